"""The disk: the primitive file operations of a run, and the two helpers built from them.

Every file operation of a run goes through a `Disk`, so that a test can put a recording or a
failing disk in its place. Nothing here knows what the files mean. What is durable when:

    create, write, write_bytes, append_bytes   after `sync` or `sync_file` of that file (contents and size)
    create, rename, remove, make_folder   after `sync_folder` of the folder that holds the name

Until then a power loss keeps, drops or tears each of them on its own, in any order.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from packmule.errors import DamagedFile, DiskError
from packmule.kernels.native import NativeKernels, library_path
from packmule.kernels.transfers import BLOCK_BYTES, Span, TransferFailed, Transfers, address
from packmule.shapes.layout import PAGE

Checksum = Callable[[memoryview], int]
"""CRC32C of some bytes."""

_UNSYNCABLE_FOLDER = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


@dataclass(frozen=True)
class Handle:
    """An open file.

    Attributes:
        path: what was opened.
        number: the disk's own number for it.
        direct: whether transfers bypass the page cache; then buffers, offsets and sizes
            must be multiples of 4096 bytes.
    """

    path: Path
    number: int
    direct: bool


class Disk(Protocol):
    """Primitive file operations. All raise DiskError naming the path, with a hint."""

    def create(self, path: Path, size: int) -> None:
        """Make a new file of `size` > 0 bytes, all allocated now, reading as zeros.

        Raises:
            DiskError: it exists, or does not fit (nothing is left behind).
        """

    def open(self, path: Path, write: bool) -> Handle:
        """Open an existing file for reading, or for reading and writing."""

    def close(self, handle: Handle) -> None:
        """Let go of it. Does not sync."""

    def read_into(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset` on.

        Raises:
            DamagedFile: the file ends before the buffer is full.
        """

    def write(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at byte `offset`."""

    def read_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        """Fill every span; what each sums to (nothing without a checksum). Errors as of `read_into`."""

    def write_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        """Write every span; what each summed to before it was written (nothing without a checksum)."""

    def sync(self, handle: Handle) -> None:
        """Make the file's contents and size durable (fdatasync)."""

    def read_bytes(self, path: Path) -> bytes:
        """The contents of a small file."""

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Create or overwrite a small file. Not synced: see `replace_file`."""

    def append_bytes(self, path: Path, data: bytes) -> None:
        """Add to the end of a small file, which is made if need be. Not synced.

        Raises:
            DiskError: part of `data` may be there.
        """

    def sync_file(self, path: Path) -> None:
        """Make a closed file's contents and size durable (fsync)."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in the same folder, atomically replacing a file."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def remove(self, path: Path) -> None:
        """Remove a file or an empty folder."""

    def make_folder(self, path: Path) -> None:
        """Make one folder; its parent must exist. No error if it is there."""

    def exists(self, path: Path) -> bool:
        """Whether the name is there."""

    def size(self, path: Path) -> int:
        """Bytes of a file."""

    def list(self, path: Path) -> tuple[str, ...]:
        """Names in a folder, sorted."""

    def free_bytes(self, path: Path) -> int:
        """Bytes this user can still write to the file system that holds `path`."""


def read_in_turn(disk: Disk, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
    """`read_summed` from the plain transfers of a disk: one after the other."""
    sums = []
    for span in spans:
        disk.read_into(handle, span.buffer, span.offset)
        if checksum:
            sums.append(checksum(span.buffer))
    return sums


def write_in_turn(disk: Disk, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
    """`write_summed` likewise."""
    sums = []
    for span in spans:
        # Summed before the write: what a faulty disk does to it must show.
        if checksum:
            sums.append(checksum(span.buffer))
        disk.write(handle, span.buffer, span.offset)
    return sums


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a whole small file so that a crash leaves either the old or the new contents.

    The new contents are durable before the name points at them, and the name is durable
    when this returns.
    """
    temporary = path.with_name(path.name + ".tmp")
    disk.write_bytes(temporary, data)
    disk.sync_file(temporary)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def ensure_folder(disk: Disk, path: Path) -> None:
    """Make a folder and what is missing above it, all durable when this returns."""
    for folder in (*reversed(path.parents), path):
        if not disk.exists(folder):
            disk.make_folder(folder)
        # Also when it was there: an earlier process may have died before its own sync.
        if folder != folder.parent:
            disk.sync_folder(folder.parent)


def remove_folder(disk: Disk, path: Path) -> None:
    """Remove a folder of plain files. Not synced."""
    for name in disk.list(path):
        disk.remove(path / name)
    disk.remove(path)


def aligned_buffer(size: int) -> memoryview:
    """A writable buffer of `size` bytes that starts on a 4096-byte boundary."""
    raw = np.empty(size + PAGE, np.uint8)
    start = -address(raw.data) % PAGE
    return raw[start : start + size].data


class PosixDisk:
    """The machine's files. Uses O_DIRECT where the file system has it. Where the native library is built,
    some blocks of a large transfer are under way at once, and are summed meanwhile.

    Args:
        direct: False never asks for O_DIRECT.
        ring: False never asks for an io_uring.
    """

    def __init__(self, direct: bool = True, ring: bool = True) -> None:
        self._direct = direct
        self._ring = ring
        self._built = library_path() is not None
        self._transfers: Transfers | None = None
        self._making = threading.Lock()

    def create(self, path: Path, size: int) -> None:
        free = self.free_bytes(path.parent)
        if size > free:
            raise _full(path, size, free)
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _explain(path, "create", error, size) from None
        try:
            os.posix_fallocate(number, 0, size)
        except OSError as error:
            os.unlink(path)
            raise _explain(path, "allocate", error, size) from None
        finally:
            os.close(number)

    def open(self, path: Path, write: bool) -> Handle:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        if self._direct:
            try:
                return Handle(path, os.open(path, flags | os.O_DIRECT), direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise _explain(path, "open", error) from None
        try:
            return Handle(path, os.open(path, flags), direct=False)
        except OSError as error:
            raise _explain(path, "open", error) from None

    def close(self, handle: Handle) -> None:
        os.close(handle.number)

    def read_into(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        view = _checked(handle, buffer, offset)
        if self._native(view):
            self._move(handle, [Span(view, offset)], write=False, summed=False)
            return
        done = 0
        while done < len(view):
            try:
                got = os.preadv(handle.number, [view[done:]], offset + done)
            except OSError as error:
                raise _explain(handle.path, "read", error, len(view) - done) from None
            # A direct read stops off the page grid only where the file ends.
            if got == 0 or (handle.direct and got % PAGE):
                raise _ends(handle.path, offset + done + got, len(view) - done - got)
            done += got

    def write(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        view = _checked(handle, buffer, offset)
        if self._native(view):
            self._move(handle, [Span(view, offset)], write=True, summed=False)
            return
        done = 0
        while done < len(view):
            try:
                put = os.pwritev(handle.number, [view[done:]], offset + done)
            except OSError as error:
                raise _explain(handle.path, "write", error, len(view) - done) from None
            if handle.direct:
                put -= put % PAGE  # go on from the grid; the torn page is written again
            if put == 0:
                refused = OSError(errno.EIO, "no bytes accepted")
                raise _explain(handle.path, "write", refused, len(view) - done)
            done += put

    def read_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        if not self._fused(checksum):
            return read_in_turn(self, handle, spans, checksum)
        return self._move(handle, spans, write=False, summed=checksum is not None)

    def write_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        if not self._fused(checksum):
            return write_in_turn(self, handle, spans, checksum)
        return self._move(handle, spans, write=True, summed=checksum is not None)

    def _native(self, view: memoryview) -> bool:
        """Whether csrc moves it: what is shorter is not worth the call."""
        return len(view) > BLOCK_BYTES and self._built

    def _fused(self, checksum: Checksum | None) -> bool:
        """Whether the native library moves chunks, and sums them on the way as `checksum` does."""
        return self._built and (
            checksum is None or isinstance(getattr(checksum, "__self__", None), NativeKernels)
        )

    def _move(self, handle: Handle, spans: Sequence[Span], write: bool, summed: bool = True) -> list[int]:
        with self._making:
            if self._transfers is None:
                self._transfers = Transfers(self._ring)
        views = [Span(_checked(handle, span.buffer, span.offset), span.offset) for span in spans]
        try:
            return self._transfers.run(handle.number, write, handle.direct, views, summed)
        except TransferFailed as failed:
            span = views[failed.span]
            left = len(span.buffer) - failed.moved
            if failed.number is None:
                raise _ends(handle.path, span.offset + failed.moved, left) from None
            error = OSError(failed.number, os.strerror(failed.number))
            raise _explain(handle.path, "write" if write else "read", error, left) from None

    def sync(self, handle: Handle) -> None:
        try:
            os.fdatasync(handle.number)
        except OSError as error:
            raise _explain(handle.path, "sync", error) from None

    def read_bytes(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise _explain(path, "read", error) from None

    def write_bytes(self, path: Path, data: bytes) -> None:
        try:
            path.write_bytes(data)
        except OSError as error:
            raise _explain(path, "write", error, len(data)) from None

    def append_bytes(self, path: Path, data: bytes) -> None:
        done = 0
        try:
            with path.open("ab", buffering=0) as file:
                while done < len(data):
                    done += file.write(data[done:])
        except OSError as error:
            raise _explain(path, "write", error, len(data) - done) from None

    def sync_file(self, path: Path) -> None:
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(number)
            finally:
                os.close(number)
        except OSError as error:
            raise _explain(path, "sync", error) from None

    def rename(self, source: Path, target: Path) -> None:
        try:
            os.rename(source, target)
        except OSError as error:
            raise _explain(source, f"rename to {target.name}", error) from None

    def sync_folder(self, path: Path) -> None:
        try:
            number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(number)
            finally:
                os.close(number)
        except OSError as error:
            # Some file systems cannot sync a folder: they order names themselves. And a folder
            # this user may not read is somebody else's: the names in it were there before.
            if error.errno not in _UNSYNCABLE_FOLDER:
                raise _explain(path, "sync", error) from None

    def remove(self, path: Path) -> None:
        try:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
        except OSError as error:
            raise _explain(path, "remove", error) from None

    def make_folder(self, path: Path) -> None:
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise _explain(path, "make", error) from None

    def exists(self, path: Path) -> bool:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _explain(path, "look at", error) from None
        return True

    def size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError as error:
            raise _explain(path, "look at", error) from None

    def list(self, path: Path) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(path)))
        except OSError as error:
            raise _explain(path, "list", error) from None

    def free_bytes(self, path: Path) -> int:
        try:
            status = os.statvfs(path)
        except OSError as error:
            raise _explain(path, "look at", error) from None
        return status.f_bavail * status.f_frsize


def _checked(handle: Handle, buffer: memoryview, offset: int) -> memoryview:
    view = buffer.cast("B")
    if handle.direct and (offset % PAGE or len(view) % PAGE or address(view) % PAGE):
        raise AssertionError(
            f"{handle.path}: direct transfers need multiples of {PAGE}: offset {offset}, "
            f"{len(view)} bytes, address {address(view):#x}"
        )
    return view


def _ends(path: Path, at: int, missing: int) -> DamagedFile:
    return DamagedFile(
        f"{path} ends at byte {at:,}, {missing:,} bytes too early.", "go back to the newest snapshot"
    )


def _free(path: Path) -> int | None:
    for folder in (path, *path.parents):
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return None


def _full(path: Path, size: int, free: int | None) -> DiskError:
    missing = max(size - (free or 0), 0)
    return DiskError(
        f"{path}: the disk is full: {size:,} bytes to write, {free or 0:,} bytes free.",
        f"free at least {missing or size:,} bytes there or use another disk, then run the same command",
    )


_HINTS = {
    errno.EIO: "the device or its driver failed: see `dmesg`; copy the run elsewhere before you go on",
    errno.EROFS: "mount it read-write or use another folder, then run the same command",
    errno.EFBIG: "raise the file size limit (`ulimit -f`) or use a file system with larger files",
    errno.ENOENT: "check the path",
    errno.EEXIST: "use another folder or remove it",
    errno.EACCES: "give this user the right to write there or use another folder",
    errno.EPERM: "give this user the right to write there or use another folder",
}


def _explain(path: Path, action: str, error: OSError, size: int | None = None) -> DiskError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and size is not None:
        return _full(path, size, _free(path))
    what = f" {size:,} bytes" if size is not None else ""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return DiskError(
        f"{path}: cannot {action}{what}: {reason}.",
        _HINTS.get(error.errno or 0, "check the disk, then run the same command"),
    )
