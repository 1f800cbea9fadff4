"""One process tree per run, however its processes end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packmule.checkpoint.lock import RunLock
from packmule.errors import DiskError, PackmuleError

HOLD = "import sys; print('held', flush=True); sys.stdin.read()"
LOCK = """
from pathlib import Path
from packmule.checkpoint.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
"""


@contextmanager
def holder(run: Path, fds: tuple[int, ...] = (), lock: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run until its input closes or it is killed."""
    code = "import sys\n" + (LOCK if lock else "") + HOLD
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_second_process_is_refused_with_the_first_ones_id(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(PackmuleError) as caught:
            RunLock(tmp_path)
        assert f"process {process.pid} on {socket.gethostname()}" in caught.value.cause
        assert str(tmp_path) in caught.value.cause and caught.value.exit_code == 2


def test_a_killed_holder_leaves_the_run_free(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        with RunLock(tmp_path):
            assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())


def test_closing_frees_the_run(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLock(tmp_path), pytest.raises(PackmuleError, match=f"process {os.getpid()} "):
            RunLock(tmp_path)


def test_a_child_that_was_given_the_lock_keeps_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with holder(tmp_path, (lock.fileno(),), lock=False) as child:
        lock.close()
        with pytest.raises(PackmuleError, match="is in use"):
            RunLock(tmp_path)
        child.kill()
        child.wait(timeout=60)
        RunLock(tmp_path).close()


def test_a_missing_folder_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="absent/lock: cannot open: No such file"):
        RunLock(tmp_path / "absent")
