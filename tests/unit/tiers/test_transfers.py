"""Transfers with checksums on the way: bytes, sums and errors of one plain transfer after the other."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from packmule.errors import DamagedFile, DiskError
from packmule.kernels import checksum, crc, native
from packmule.kernels.transfers import Span, TransferFailed, Transfers
from packmule.tiers.disk import PAGE, PosixDisk, aligned_buffer

pytestmark = pytest.mark.skipif(native.library_path() is None, reason="the native library is not built")
MODES = [(direct, ring) for direct in (True, False) for ring in (True, False)]


def random_spans(rng: random.Random, file_bytes: int, grid: int) -> list[Span]:
    """Apart from each other, some of several blocks, one of no bytes at all."""
    spans, at = [], 0
    while at < file_bytes:
        size = min(rng.choice((0, 1, 7, 256, 257, 600)) * grid, file_bytes - at)
        buffer = aligned_buffer(size + 1)[:size]
        buffer[:] = rng.randbytes(size)
        spans.append(Span(buffer, at))
        at += size + rng.choice((0, 3)) * grid
    rng.shuffle(spans)
    return spans


@pytest.mark.parametrize(("direct", "ring"), MODES)
def test_spans_arrive_and_are_summed_like_plain_transfers(
    tmp_path: Path, direct: bool, ring: bool, seed: int
) -> None:
    rng = random.Random(seed)
    disk, path, total = PosixDisk(direct, ring), tmp_path / "file", 1500 * PAGE
    disk.create(path, total)
    handle = disk.open(path, write=True)
    spans = random_spans(rng, total, PAGE if handle.direct else 1000)
    expected = [crc.crc32c(span.buffer) for span in spans]
    assert disk.write_summed(handle, spans, checksum()) == expected
    disk.sync(handle)
    raw = path.read_bytes()
    for span in spans:
        assert raw[span.offset : span.offset + len(span.buffer)] == span.buffer
    found = [Span(aligned_buffer(len(s.buffer) + 1)[: len(s.buffer)], s.offset) for s in spans]
    assert disk.read_summed(handle, found, checksum()) == expected
    assert [bytes(span.buffer) for span in found] == [bytes(span.buffer) for span in spans]
    for span in spans:  # without sums
        disk.write(handle, span.buffer, span.offset)
    plain = [Span(aligned_buffer(len(s.buffer) + 1)[: len(s.buffer)], s.offset) for s in spans]
    for span in plain:
        disk.read_into(handle, span.buffer, span.offset)
    assert [bytes(span.buffer) for span in plain] == [bytes(span.buffer) for span in spans]
    # A checksum that is not the library's is computed as given, over the same bytes.
    assert disk.read_summed(handle, found, lambda view: len(view)) == [len(s.buffer) for s in spans]
    disk.close(handle)


@pytest.mark.parametrize(("direct", "ring"), MODES)
def test_long_transfers_without_sums_arrive(tmp_path: Path, direct: bool, ring: bool, seed: int) -> None:
    """More blocks than are under way at once, over several spans and alone."""
    disk, path, sizes = (
        PosixDisk(direct, ring),
        tmp_path / "file",
        (9 << 20, PAGE, 4 << 20, (13 << 20) + PAGE),
    )
    data = random.Random(seed).randbytes(sum(sizes))
    disk.create(path, len(data))
    handle = disk.open(path, write=True)
    source, target = aligned_buffer(len(data)), aligned_buffer(len(data))
    source[:] = data
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = list(zip(starts, sizes, strict=True))
    assert disk.write_summed(handle, [Span(source[at : at + size], at) for at, size in parts], None) == []
    disk.sync(handle)
    assert path.read_bytes() == data
    assert disk.read_summed(handle, [Span(target[at : at + size], at) for at, size in parts], None) == []
    assert target == data
    target[:] = bytes(len(data))
    disk.read_into(handle, target, 0)
    assert target == data
    disk.close(handle)


@pytest.mark.parametrize(("direct", "ring"), MODES)
@pytest.mark.parametrize("kept", [0, 100, PAGE, (1 << 20) + 512, 5 * (1 << 20) - 1])
def test_a_truncated_file_is_named_with_what_is_missing(
    tmp_path: Path, direct: bool, ring: bool, kept: int
) -> None:
    disk, path, size = PosixDisk(direct, ring), tmp_path / "state.bin", 5 << 20
    disk.create(path, size)
    os.truncate(path, kept)
    handle = disk.open(path, write=False)
    with pytest.raises(DamagedFile, match=rf"state.bin ends at byte {kept:,}, {size - kept:,} bytes too"):
        disk.read_summed(handle, [Span(aligned_buffer(size), 0)], checksum())
    with pytest.raises(DamagedFile, match=rf"state.bin ends at byte {kept:,}, {size - kept:,} bytes too"):
        disk.read_into(handle, aligned_buffer(size), 0)
    disk.close(handle)


@pytest.mark.parametrize("ring", [True, False])
def test_short_reads_are_carried_on(ring: bool, tmp_path: Path) -> None:
    """A file of the kernel's own gives a page or less at a time."""
    path = Path("/proc/kallsyms")
    plain = path.read_bytes()[: 3 << 20]
    number = os.open(path, os.O_RDONLY)
    short = os.pread(number, len(plain), 0)
    buffer = memoryview(bytearray(len(plain)))
    assert len(short) < len(plain)
    found = Transfers(ring).run(number, False, False, [Span(buffer, 0)])
    os.close(number)
    assert bytes(buffer) == plain and found == [crc.crc32c(plain)]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from packmule.errors import DiskError
from packmule.kernels import checksum
from packmule.kernels.transfers import Span
from packmule.tiers.disk import PosixDisk, aligned_buffer
direct, ring, limit = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
disk, path = PosixDisk(bool(direct), bool(ring)), Path(sys.argv[1])
disk.create(path, 8 << 20)
handle = disk.open(path, write=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
buffer = aligned_buffer(8 << 20)
buffer[:] = b"x" * (8 << 20)
try:
    disk.write_summed(handle, [Span(buffer[:4096], 0), Span(buffer[4096:], 4096)], checksum())
except DiskError as error:
    print(error)
"""


@pytest.mark.parametrize(("direct", "ring"), MODES)
def test_a_write_that_is_cut_short_is_named_with_what_is_left(
    tmp_path: Path, direct: bool, ring: bool
) -> None:
    """The limit lies within a block: a short write, then an error."""
    path, limit = tmp_path / "state.bin", (3 << 20) + 8192
    arguments = [sys.executable, "-c", LIMITED, str(path), str(int(direct)), str(int(ring)), str(limit)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    left = (8 << 20) - limit
    assert f"state.bin: cannot write {left:,} bytes: File too large." in done.stdout, done.stderr
    data = path.read_bytes()
    assert data[:limit] == b"x" * limit and data[limit:] == bytes(left)


@pytest.mark.parametrize("ring", [True, False])
def test_a_full_device_and_a_closed_file_are_errors(ring: bool) -> None:
    made, span = Transfers(ring), Span(aligned_buffer(3 << 20), 0)
    number = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(TransferFailed) as full:
        made.run(number, True, False, [span])
    os.close(number)
    assert (full.value.number, full.value.moved) == (28, 0)
    with pytest.raises(TransferFailed) as closed:
        made.run(number, True, False, [span])
    assert closed.value.number == 9
    with pytest.raises(DiskError, match="the disk is full"):
        disk = PosixDisk(ring=ring)
        disk.write_summed(disk.open(Path("/dev/full"), write=True), [span], checksum())


@pytest.mark.parametrize("ring", [True, False])
def test_threads_take_turns_and_signals_do_no_harm(tmp_path: Path, ring: bool, seed: int) -> None:
    rng = random.Random(seed)
    disk, path, size = PosixDisk(ring=ring), tmp_path / "file", 6 << 20
    disk.create(path, 4 * size)
    handle = disk.open(path, write=True)
    data = [rng.randbytes(size) for _ in range(4)]
    wrong = []

    def work(index: int) -> None:
        buffer = aligned_buffer(size)
        for _ in range(4):
            buffer[:] = data[index]
            disk.write_summed(handle, [Span(buffer, index * size)], checksum())
            buffer[:] = bytes(size)
            found = disk.read_summed(handle, [Span(buffer, index * size)], checksum())
            if bytes(buffer) != data[index] or found != [crc.crc32c(data[index])]:
                wrong.append(index)

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    disk.close(handle)
    assert not wrong


def test_the_ring_is_used_where_the_kernel_has_one() -> None:
    try:
        switched_off = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip() != "0"
    except OSError:
        switched_off = False  # an older kernel, or none of this file: then whatever it gives
        if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 6):
            switched_off = True
    assert not Transfers(ring=False).ring
    if not switched_off and os.uname().machine == "x86_64" and resource.getpagesize() == PAGE:
        number = _setup()
        assert Transfers().ring == (number >= 0)


def _setup() -> int:
    """io_uring_setup by hand: a file, or -1 where this process may not."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    number = int(libc.syscall(425, 4, ctypes.create_string_buffer(256)))
    if number >= 0:
        os.close(number)
    return number
