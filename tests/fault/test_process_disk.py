"""Disks that are full from the start, fill up on the way, or cannot be written to.

A small tmpfs where this user may mount one; elsewhere the limit on a file's size stands in for it.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import Base, Job, compare, head_step, state_of
from processes import Running

INJECT = Path(__file__).parent / "inject"
KB, MB = 1 << 10, 1 << 20
PLAN = "on-backward"


@dataclass(frozen=True)
class SmallDisk:
    """A folder with little room.

    Attributes:
        mounted: it is a file system of its own.
    """

    folder: Path
    mounted: bool

    @property
    def free_bytes(self) -> int:
        """Room left."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int) -> Path:
        """Take all room but some."""
        path = self.folder / "filler"
        path.write_bytes(bytes(max(0, self.free_bytes - leave)))
        return path

    def remount(self, options: str) -> None:
        """With other options."""
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True, timeout=30)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder]
    try:
        mounted = not subprocess.run(mount, timeout=30, capture_output=True).returncode
    except OSError:
        mounted = False
    yield SmallDisk(folder, mounted)
    if mounted:
        subprocess.run(["umount", folder], check=True, timeout=30)


def limited(size: int) -> str:
    """Python that forbids files larger than `size` from then on."""
    return f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {resource.RLIM_INFINITY}))\n"


def test_what_would_not_fit_is_refused_before_the_first_step(base: Base, disk: SmallDisk) -> None:
    job = base.on(disk.folder, disk.folder / "run", PLAN)
    if disk.mounted:
        disk.fill(leave=1 * MB)
        message = job.run().refused(4, "The run needs", str(job.out), "are free", "short")
        numbers = re.findall(r"([\d.]+) (GB|MB|kB|KB)", message)
        assert len(numbers) >= 3, message
        (disk.folder / "filler").unlink()
    else:
        job.run(limited(300 * KB)).refused(4, "state.bin")
    assert head_step(job.out) == -1
    result = job.run()
    assert result.code == 0, result.err
    compare(job.out, base.expected(PLAN))


@pytest.mark.parametrize(
    ("moment", "room", "file"),
    [("step", 0, "HEAD.json.tmp"), ("snapshot", 200 * KB, "checkpoint-"), ("export", 60 * KB, "final")],
)
def test_a_disk_that_fills_up_keeps_the_last_commit(
    base: Base, disk: SmallDisk, moment: str, room: int, file: str
) -> None:
    flags = {"save_steps": "null"} if moment == "export" else {}
    job = base.on(disk.folder, disk.folder / "run", PLAN, **flags)
    if disk.mounted:
        with job.start() as running:
            assert running.until_phase("step", 2 if moment == "step" else 4)
            fill_while_stopped(running, disk, room)
            result = running.end()
        message = result.refused(4, str(job.out), file)
        assert re.search(r"[\d,]+ bytes to write, [\d,]+ bytes free", message), message
    else:
        assert job.run(limited(100)).code == 4
        result = job.run()
        assert result.code == 0
    if moment != "export":
        assert head_step(job.out) >= result.last_step - 1
    state_of(job.out)
    (disk.folder / "filler").unlink(missing_ok=True)
    again = job.run()
    assert again.code == 0, again.err
    compare(job.out, base.expected(PLAN))
    assert not list(job.out.rglob("*.partial")) and not list(job.out.glob("checkpoint-*.tmp"))


def fill_while_stopped(running: Running, disk: SmallDisk, room: int) -> None:
    (child,) = running.children()
    os.kill(child, signal.SIGSTOP)
    try:
        disk.fill(leave=room)
    finally:
        os.kill(child, signal.SIGCONT)


def test_a_log_that_cannot_grow_stops_the_run_by_name(base: Base, tmp_path: Path) -> None:
    # Only appending to the log meets this limit: state.bin is written in place below it.
    job = base.partial(tmp_path / "run", PLAN)
    size = (job.out / "log.jsonl").stat().st_size
    fits = max(path.stat().st_size for path in job.out.rglob("*") if path.is_file())
    padded = job.out / "log.jsonl"
    lines = padded.read_text().splitlines()
    filler = '{"step": 0, "filler": "' + "x" * (fits - size) + '"}'
    padded.write_text("\n".join([filler, *lines]) + "\n")
    result = job.run(limited(padded.stat().st_size + 20))
    result.refused(4, str(padded), "bytes", "File too large")
    state_of(job.out)
    padded.write_text("\n".join(lines) + "\n")
    again = job.run()
    assert again.code == 0, again.err
    compare(job.out, base.expected(PLAN))


def test_a_folder_that_cannot_be_made_is_refused(base: Base, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = base.job(tmp_path / "file" / "run", PLAN)
    job.run().refused(4, str(tmp_path / "file" / "run"), "--output-dir")


def test_a_read_only_disk_is_refused_and_the_run_goes_on_elsewhere(base: Base, disk: SmallDisk) -> None:
    out = disk.folder / "run"
    job: Job = base.on(disk.folder, base.partial(out, PLAN).out, PLAN)
    if disk.mounted:
        disk.remount("ro")
        cause = f"{out} cannot be written: Read-only file system."
        job.run().refused(4, cause, "choose another --output-dir or --disk")
        disk.remount("rw")
    else:
        job.run(limited(0)).refused(4, str(out))
    result = job.run()
    assert result.code == 0, result.err
    compare(out, base.expected(PLAN))


def test_a_disk_that_hangs_is_named_at_its_deadline(
    base: Base, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = base.job(tmp_path / "run", PLAN)
    write = random.Random(seed).randrange(20, 60)
    with monkeypatch.context() as patch:
        rest = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(INJECT), rest))))
        patch.setenv("HUNG_DISK", json.dumps({"write": write, "seconds": 1.5}))
        message = job.run().refused(4)
    said = re.sub(r"\d[\d,]*", "N", message.replace(str(job.out), "OUT"))
    assert said.strip() == (
        "error: OUT/state.bin: the disk has not answered for N s (writing N bytes at N).\n"
        "hint: see `dmesg` and check the device or the network it is mounted from; the last commit is kept, "
        "and the same command carries on from it once the disk answers"
    )
    state_of(job.out)
    again = job.run()
    assert again.code == 0, again.err
    compare(job.out, base.expected(PLAN))
