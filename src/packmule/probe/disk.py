"""How fast one folder's disk reads, writes, does both, and makes a small write durable.

The measurement does what a run does: chunks of 4 MiB from memory in huge pages, each by the same
call as a run's, past the page cache (O_DIRECT), over a file whose space is already allocated
and written. Its temporary file loses its name as soon as it is open, so no way of dying leaves it
behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packmule.errors import DiskError, PackmuleError
from packmule.kernels.native import library_path
from packmule.kernels.transfers import Span, TransferFailed, Transfers
from packmule.probe.mounts import mount_of
from packmule.probe.roots import HOST, Roots
from packmule.spec.hardware import MIX_BYTES, DiskSpeed

BLOCK_BYTES = MIX_BYTES
_BUFFER_BLOCKS = 4
_SYNC_BYTES = 4096
_SYNC_WRITES = 20
_LEAST_BLOCKS = 2
_RAM_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

Pass = Callable[[int], int]
"""One timed piece of I/O: the block's number in, bytes moved out."""


@dataclass(frozen=True)
class Place:
    """An existing folder, the file system it is on, and that file system's bytes."""

    folder: Path
    device: str
    filesystem: str
    free_bytes: int
    total_bytes: int


def locate(path: Path | str, roots: Roots = HOST) -> Place:
    """The folder that will hold `path`: itself, or the nearest ancestor when it does not exist yet.

    Raises:
        DiskError: it is a file, or cannot be reached.
    """
    folder = Path(path).expanduser().absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise DiskError(f"{folder} is a file, not a folder.", "name a folder on the disk to use")
        space = os.statvfs(folder)
        number = os.stat(folder).st_dev
    except OSError as error:
        raise _unusable(folder, error) from None
    mount = mount_of(folder, roots)
    device = f"{mount.source} {mount.filesystem}" if mount else f"{os.major(number)}:{os.minor(number)}"
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return Place(folder, device, mount.filesystem if mount else "", free, total)


def measure_disk(
    path: Path | str, roots: Roots = HOST, file_bytes: int = 512 << 20, seconds: float = 1.0
) -> DiskSpeed:
    """Time one folder's disk.

    Args:
        path: a folder, or one that can be made below an existing folder.
        roots: where /proc is, for the file system's type.
        file_bytes: size of the temporary file; an eighth of the free space when that is less.
        seconds: the most one of the passes may take beyond its first two blocks.

    Raises:
        DiskError: the folder is read-only, full, or fails while it is used.
    """
    place = locate(path, roots)
    in_ram = place.filesystem in _RAM_FILESYSTEMS
    size = min(file_bytes, 64 << 20) if in_ram else file_bytes
    size = min(size, place.free_bytes // 8) // BLOCK_BYTES * BLOCK_BYTES
    if size < 2 * _LEAST_BLOCKS * BLOCK_BYTES:
        raise DiskError(
            f"{place.folder} has {place.free_bytes / 1e6:.0f} MB free, too little to measure its disk.",
            "free some space, or name a folder on another disk",
        )
    try:
        with _nameless_file(place.folder, size, try_direct=not in_ram) as file:
            return _timed_passes(file, place, size, seconds)
    except OSError as error:
        raise _unusable(place.folder, error) from None


@dataclass(frozen=True)
class _File:
    """An open file without a name: `fd` for the blocks (O_DIRECT if `direct`), `plain_fd` buffered."""

    fd: int
    plain_fd: int
    direct: bool


def _timed_passes(file: _File, place: Place, size: int, seconds: float) -> DiskSpeed:
    transfers = Transfers() if library_path() is not None else None
    with _buffer() as memory:

        def write(number: int) -> int:
            return _moved(transfers, file, True, memory, number)

        def read(number: int) -> int:
            return _moved(transfers, file, False, memory, number)

        # Blocks never written would be read from nowhere and written more slowly than later.
        blocks = _blocks_done(write, size // BLOCK_BYTES, 2 * seconds)
        os.fdatasync(file.fd)
        half = blocks // 2

        def mix(number: int) -> int:
            return read(number // 2) if number % 2 == 0 else write(half + number // 2)

        write_rate = _rate(write, blocks, seconds, file)
        _forget(file)
        read_rate = _rate(read, blocks, seconds, file)
        _forget(file)
        mix_rate = _rate(mix, 2 * half, seconds, file)
    return DiskSpeed(
        path=str(place.folder),
        direct=file.direct,
        read_bytes_per_second=read_rate,
        write_bytes_per_second=write_rate,
        mix_bytes_per_second=mix_rate,
        sync_seconds=_sync_seconds(file.plain_fd, seconds),
        free_bytes=place.free_bytes,
        total_bytes=place.total_bytes,
        device=place.device,
        filesystem=place.filesystem,
    )


@contextmanager
def _buffer() -> Iterator[mmap.mmap]:
    """Memory as a run's: page-aligned, as O_DIRECT needs, in huge pages where the kernel gives them."""
    with mmap.mmap(-1, _BUFFER_BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        # Random bytes, so that no compressing disk or file system flatters itself.
        memory.write(os.urandom(len(memory)))
        yield memory


def _moved(transfers: Transfers | None, file: _File, write: bool, memory: mmap.mmap, number: int) -> int:
    """Move one block; its bytes."""
    low, offset = number % _BUFFER_BLOCKS * BLOCK_BYTES, number * BLOCK_BYTES
    with memoryview(memory) as whole, whole[low : low + BLOCK_BYTES] as block:
        if transfers is None:
            if write:
                return _full(os.pwrite(file.fd, block, offset))
            return _full(os.preadv(file.fd, [block], offset))
        try:
            transfers.run(file.fd, write, file.direct, [Span(block, offset)], summed=False)
        except TransferFailed as failed:
            number = failed.number or errno.EIO
            raise OSError(number, os.strerror(number)) from None
        return BLOCK_BYTES


def _blocks_done(step: Pass, blocks: int, seconds: float) -> int:
    """How many of the blocks `step` could do in that time; at least four."""
    started = time.perf_counter()
    for number in range(blocks):
        if number >= 2 * _LEAST_BLOCKS and time.perf_counter() - started > seconds:
            return number
        step(number)
    return blocks


def _rate(step: Pass, blocks: int, seconds: float, file: _File) -> float:
    """Bytes per second of `step` over the blocks, durable at the end (which costs reads nothing)."""
    moved = 0
    started = time.perf_counter()
    for number in range(blocks):
        if number >= _LEAST_BLOCKS and time.perf_counter() - started > seconds:
            break
        moved += step(number)
    os.fdatasync(file.fd)
    return moved / max(time.perf_counter() - started, 1e-9)


def _sync_seconds(fd: int, seconds: float) -> float:
    """Median seconds of a 4 KiB write and its fdatasync."""
    data = os.urandom(_SYNC_BYTES)
    times: list[float] = []
    while len(times) < _SYNC_WRITES and (len(times) < 3 or sum(times) < seconds):
        started = time.perf_counter()
        os.pwrite(fd, data, len(times) * _SYNC_BYTES)
        os.fdatasync(fd)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _forget(file: _File) -> None:
    """Drop clean cached pages, so that a buffered read comes from the disk."""
    with suppress(OSError):
        os.posix_fadvise(file.plain_fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _nameless_file(folder: Path, size: int, try_direct: bool) -> Iterator[_File]:
    plain_fd, name = tempfile.mkstemp(prefix=".packmule-probe-", dir=folder)
    fd = -1
    try:
        try:
            fd = _open_direct(name) if try_direct else -1
        finally:
            os.unlink(name)
        _allocate(plain_fd, size)
        direct = fd >= 0 and _accepts_blocks(fd)
        yield _File(fd if direct else plain_fd, plain_fd, direct)
    finally:
        for opened in (fd, plain_fd):
            if opened >= 0:
                os.close(opened)


def _open_direct(name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


def _accepts_blocks(fd: int) -> bool:
    """Whether an aligned write works; some file systems take the flag and refuse the write."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            return os.pwrite(fd, block, 0) == BLOCK_BYTES
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # Not every file system can; the first pass then allocates by writing.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
            raise


def _full(moved: int) -> int:
    if moved != BLOCK_BYTES:
        raise OSError(errno.EIO, f"moved {moved} bytes of a {BLOCK_BYTES}-byte block")
    return moved


def _unusable(folder: Path, error: OSError) -> PackmuleError:
    cause = f"The disk of {folder} cannot be measured: {error.strerror or error}."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return DiskError(cause, "name a folder you may write to")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(cause, "free some space, or name a folder on another disk")
    return DiskError(cause, "check the disk (dmesg), or name a folder on another one")
