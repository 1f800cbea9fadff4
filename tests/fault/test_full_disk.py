"""A disk that fills up, breaks or turns read-only at any operation: one DiskError, and the
run goes on from its last commit once there is room."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest
from known_run import LAYOUT, RUN, Promise, Scenario, check, contents, new_store, train
from recording_disk import RecordingDisk

from packmule.checkpoint.store import StateStore
from packmule.checkpoint.verify import verify
from packmule.errors import DiskError
from packmule.tiers.disk import Handle, PosixDisk

PLAN = Scenario(steps=4, commit_steps=2, snapshot_steps=2, streamed=True)
CHANGES = ("create", "write", "sync", "write_bytes", "sync_file", "rename", "sync_folder", "make_folder")


class FailingDisk(RecordingDisk):
    """Fails the operation of one number, and, if `forever`, all later ones that change anything
    but free space. A write that fails has written half."""

    def __init__(self, fail_at: int, forever: bool) -> None:
        super().__init__()
        self.fail_at, self.forever, self.count = fail_at, forever, 0

    def fails(self) -> bool:
        self.count += 1
        return self.count - 1 == self.fail_at or (self.forever and self.count > self.fail_at)

    def write(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        if self.fails():
            super().write(handle, buffer[: len(buffer) // 2], offset)
            raise DiskError(f"{handle.path}: the disk is full.")
        super().write(handle, buffer, offset)

    def write_bytes(self, path: Path, data: bytes) -> None:
        if self.fails():
            super().write_bytes(path, data[: len(data) // 2])
            raise DiskError(f"{path}: the disk is full.")
        super().write_bytes(path, data)


def _failing(name: str) -> object:
    def call(self: FailingDisk, *arguments: object) -> None:
        if self.fails():
            raise DiskError(f"{name}: injected.")
        getattr(RecordingDisk, name)(self, *arguments)

    return call


for _name in set(CHANGES) - {"write", "write_bytes"}:
    setattr(FailingDisk, _name, _failing(_name))


@pytest.mark.parametrize("forever", [False, True])
def test_a_failure_at_any_operation_keeps_the_last_commit(forever: bool) -> None:
    complete = FailingDisk(1 << 30, False)
    train(complete, PLAN, Promise())
    assert complete.count > 100
    for number in range(complete.count):
        disk, promise = FailingDisk(number, forever), Promise()
        with pytest.raises(DiskError):
            train(disk, PLAN, promise)
        disk.fail_at = 1 << 30
        disk.forever = False
        check(disk, promise)
        train(disk, PLAN, promise)
        check(disk, Promise(PLAN.steps, PLAN.steps, promise.kept))


def limited(code: str, folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Run code with at most `limit` bytes per file, the helpers of this folder in reach."""
    return subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=120,
    )


TRAIN = """
import sys, json
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import known_run
from packmule.errors import DiskError
from packmule.tiers.disk import PosixDisk
promise = known_run.Promise()
try:
    known_run.train(PosixDisk(), known_run.Scenario(4, 1, 2, True, run=Path(sys.argv[2])), promise)
except DiskError as error:
    print(json.dumps([error.cause, error.hint, error.exit_code]))
print(json.dumps(promise.low))
"""


def test_a_real_limit_at_creation_is_named_and_leaves_no_state(tmp_path: Path) -> None:
    done = limited(TRAIN, tmp_path / "run", LAYOUT.bytes - 4096)
    assert done.returncode == 0, done.stderr
    (cause, hint, code), low = map(json.loads, done.stdout.splitlines())
    assert f"state.bin: cannot allocate {LAYOUT.bytes:,} bytes" in cause
    assert "ulimit -f" in hint and code == 4 and low is None
    assert list((tmp_path / "run").iterdir()) == []


def test_a_real_limit_in_the_middle_of_a_run_keeps_the_last_commit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert limited(TRAIN, run, 1 << 30).stdout.strip() == "4"
    done = limited(TRAIN.replace("Scenario(4,", "Scenario(6,"), run, 1000)
    (cause, hint, code), low = map(json.loads, done.stdout.splitlines())
    assert "cannot write" in cause and "ulimit -f" in hint and code == 4 and low == 4, done.stderr
    store = StateStore(PosixDisk(), run, LAYOUT, crc32)
    head = store.load()
    assert head is not None and head.step == 4
    store.close()
    assert verify(PosixDisk(), run, crc32).damage == ()


def test_the_failing_disk_fails_nothing_when_not_asked_to() -> None:
    disk, promise = FailingDisk(1 << 30, False), Promise()
    train(disk, PLAN, promise)
    check(disk, Promise(4, 4, {4}))
    assert new_store(disk, RUN).load() is not None and contents(4) != contents(0)
