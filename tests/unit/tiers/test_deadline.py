"""A watched disk: what is late is named, what is in time is not, and the work is the other disk's."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from packmule.errors import DiskError
from packmule.shapes.layout import PAGE
from packmule.tiers.deadline import LEAST_RATE, DeadlineDisk
from packmule.tiers.disk import Disk, Handle, PosixDisk, aligned_buffer


class Sleeper(PosixDisk):
    """Hangs in every read until told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def read_into(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        self.go_on.wait(60)
        super().read_into(handle, buffer, offset)


def written(disk: Disk, path: Path, seed: int) -> tuple[Handle, bytes]:
    disk.create(path, 2 * PAGE)
    handle, buffer = disk.open(path, write=True), aligned_buffer(2 * PAGE)
    buffer[:] = random.Random(seed).randbytes(2 * PAGE)
    disk.write(handle, buffer, 0)
    return handle, bytes(buffer)


def test_a_late_read_is_named_and_forgotten_when_it_ends(tmp_path: Path, seed: int) -> None:
    slow = Sleeper()
    disk, path = DeadlineDisk(slow, seconds=0.2), tmp_path / "state.bin"
    handle, data = written(disk, path, seed)
    assert disk.overdue() is None
    target = aligned_buffer(PAGE)
    thread = threading.Thread(target=disk.read_into, args=(handle, target, PAGE))
    thread.start()
    until = time.monotonic() + 30
    while (error := disk.overdue()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert isinstance(error, DiskError) and error.exit_code == 4
    assert error.cause == f"{path}: the disk has not answered for 0 s (reading 4,096 bytes at 4,096)."
    slow.go_on.set()
    thread.join(30)
    assert disk.overdue() is None and bytes(target) == data[PAGE:]
    disk.close(handle)


def test_large_transfers_have_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("packmule.tiers.deadline.time.monotonic", lambda: clock[0])
    found: list[DiskError | None] = []

    class Slow(PosixDisk):
        def write_bytes(self, path: Path, data: bytes) -> None:
            for now in (3.9, 4.1):
                clock[0] = now
                found.append(disk.overdue())

        sync_file = lambda self, path: self.write_bytes(path, b"")  # noqa: E731

    disk = DeadlineDisk(Slow(), seconds=1.0)
    disk.write_bytes(tmp_path / "file", bytes(3 * LEAST_RATE))
    assert found[0] is None and found[1] is not None
    disk.sync_file(tmp_path / "file")  # ten times the second
    assert found[2:] == [None, None]


def test_time_in_which_the_process_was_stopped_is_not_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("packmule.tiers.deadline.time.monotonic", lambda: clock[0])
    found: list[DiskError | None] = []

    def look(seconds: float) -> None:
        clock[0] += seconds
        found.append(disk.overdue())

    class Stopped(PosixDisk):
        def write_bytes(self, path: Path, data: bytes) -> None:
            for _ in range(50):
                look(1.0)
            look(3600.0)  # stopped for an hour
            for _ in range(59):
                look(1.0)
            assert found == [None] * 110  # 119 seconds
            look(1.5)

    disk = DeadlineDisk(Stopped(), seconds=120.0)
    disk.write_bytes(tmp_path / "file", b"")
    error = found[-1]
    assert error is not None and "has not answered for 120 s" in error.cause


def test_a_failed_operation_is_over(tmp_path: Path) -> None:
    disk = DeadlineDisk(PosixDisk(), seconds=0.0)
    with pytest.raises(DiskError, match="cannot read"):
        disk.read_bytes(tmp_path / "absent")
    assert disk.overdue() is None


def test_every_operation_of_a_disk_is_watched() -> None:
    names = {name for name in vars(Disk) if not name.startswith("_")}
    assert names <= set(vars(DeadlineDisk))
