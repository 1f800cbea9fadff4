"""DeadlineDisk: a disk that knows how long each operation has been under way.

A thread that waits for a hung device cannot be woken, so the operation itself never fails: somebody
else has to ask `overdue` from time to time and end the process. Where that somebody has not asked for longer
than `LONGEST_LOOK_SECONDS`, the process itself was stopped or the machine slept: that is not the disk's time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packmule.errors import DiskError
from packmule.kernels.transfers import Span
from packmule.tiers.disk import Checksum, Disk, Handle

DEADLINE_SECONDS = 120.0
LEAST_RATE = 1_000_000
"""Bytes a second; a transfer slower than this for its size is taken for hung."""

WHOLE_FILE = 10.0
"""A sync or an allocation may take this many times longer: it may move far more than one buffer."""

LONGEST_LOOK_SECONDS = 10.0
"""Most that counts of the time between two looks."""


@dataclass(frozen=True)
class _Operation:
    text: str
    path: Path
    began: float
    limit: float


class _Clock:
    """Seconds in which this process could run, as far as its looks tell."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._looked = time.monotonic()

    def now(self) -> float:
        return self._counted + min(time.monotonic() - self._looked, LONGEST_LOOK_SECONDS)

    def look(self) -> float:
        """`now`, from which on the next stretch counts."""
        self._counted, self._looked = self.now(), time.monotonic()
        return self._counted


class DeadlineDisk:
    """Another disk, watched.

    Args:
        disk: does the work.
        seconds: how long an operation may take, besides a second per MB of a transfer.
    """

    def __init__(self, disk: Disk, seconds: float = DEADLINE_SECONDS) -> None:
        self._disk = disk
        self._seconds = seconds
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, _Operation] = {}
        self._clock = _Clock()

    def overdue(self) -> DiskError | None:
        """The error for the operation that has been late for longest, None while all are in time."""
        with self._lock:
            now = self._clock.look()
            late = [each for each in self._pending.values() if now - each.began > each.limit]
        if not late:
            return None
        first = min(late, key=lambda each: each.began)
        return DiskError(
            f"{first.path}: the disk has not answered for {now - first.began:.0f} s ({first.text}).",
            "see `dmesg` and check the device or the network it is mounted from; the last commit is kept, "
            "and the same command carries on from it once the disk answers",
        )

    @contextmanager
    def _waiting(self, path: Path, text: str, size: int = 0, factor: float = 1.0) -> Iterator[None]:
        number = next(self._numbers)
        limit = self._seconds * factor + size / LEAST_RATE
        with self._lock:
            self._pending[number] = _Operation(text, path, self._clock.now(), limit)
        try:
            yield
        finally:
            with self._lock:
                del self._pending[number]

    def create(self, path: Path, size: int) -> None:
        with self._waiting(path, f"allocating {size:,} bytes", size, WHOLE_FILE):
            self._disk.create(path, size)

    def open(self, path: Path, write: bool) -> Handle:
        with self._waiting(path, "opening it"):
            return self._disk.open(path, write)

    def close(self, handle: Handle) -> None:
        with self._waiting(handle.path, "closing it", factor=WHOLE_FILE):
            self._disk.close(handle)

    def read_into(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        size = buffer.nbytes
        with self._waiting(handle.path, f"reading {size:,} bytes at {offset:,}", size):
            self._disk.read_into(handle, buffer, offset)

    def write(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        size = buffer.nbytes
        with self._waiting(handle.path, f"writing {size:,} bytes at {offset:,}", size):
            self._disk.write(handle, buffer, offset)

    def read_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        size = sum(span.buffer.nbytes for span in spans)
        with self._waiting(handle.path, f"reading {size:,} bytes at {spans[0].offset:,}", size):
            return self._disk.read_summed(handle, spans, checksum)

    def write_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        size = sum(span.buffer.nbytes for span in spans)
        with self._waiting(handle.path, f"writing {size:,} bytes at {spans[0].offset:,}", size):
            return self._disk.write_summed(handle, spans, checksum)

    def sync(self, handle: Handle) -> None:
        with self._waiting(handle.path, "syncing it", factor=WHOLE_FILE):
            self._disk.sync(handle)

    def read_bytes(self, path: Path) -> bytes:
        with self._waiting(path, "reading it"):
            return self._disk.read_bytes(path)

    def write_bytes(self, path: Path, data: bytes) -> None:
        with self._waiting(path, f"writing {len(data):,} bytes", len(data)):
            self._disk.write_bytes(path, data)

    def append_bytes(self, path: Path, data: bytes) -> None:
        with self._waiting(path, f"writing {len(data):,} bytes", len(data)):
            self._disk.append_bytes(path, data)

    def sync_file(self, path: Path) -> None:
        with self._waiting(path, "syncing it", factor=WHOLE_FILE):
            self._disk.sync_file(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._waiting(source, f"renaming it to {target.name}"):
            self._disk.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        with self._waiting(path, "syncing it", factor=WHOLE_FILE):
            self._disk.sync_folder(path)

    def remove(self, path: Path) -> None:
        with self._waiting(path, "removing it", factor=WHOLE_FILE):
            self._disk.remove(path)

    def make_folder(self, path: Path) -> None:
        with self._waiting(path, "making it"):
            self._disk.make_folder(path)

    def exists(self, path: Path) -> bool:
        with self._waiting(path, "looking at it"):
            return self._disk.exists(path)

    def size(self, path: Path) -> int:
        with self._waiting(path, "looking at it"):
            return self._disk.size(path)

    def list(self, path: Path) -> tuple[str, ...]:
        with self._waiting(path, "listing it"):
            return self._disk.list(path)

    def free_bytes(self, path: Path) -> int:
        with self._waiting(path, "looking at it"):
            return self._disk.free_bytes(path)
