"""The disk measurement: it measures, it cleans up, and it says what is wrong."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import packmule.probe.disk as disk_module
from packmule.errors import DiskError
from packmule.probe.disk import BLOCK_BYTES, locate, measure_disk
from packmule.probe.mounts import mount_of
from packmule.probe.roots import Roots
from packmule.spec.hardware import DiskSpeed

SMALL = 4 * BLOCK_BYTES


def test_a_folder_is_measured_and_left_empty(tmp_path):
    speed = measure_disk(tmp_path, file_bytes=SMALL, seconds=0.2)
    assert speed.path == str(tmp_path)
    rates = (speed.read_bytes_per_second, speed.write_bytes_per_second, speed.mix_bytes_per_second)
    assert all(1e5 < rate < 1e13 for rate in rates)
    assert 0 < speed.sync_seconds < 5
    assert abs(speed.free_bytes - shutil.disk_usage(tmp_path).free) < 4 << 30
    assert list(tmp_path.iterdir()) == []


def test_the_folder_need_not_exist_and_is_not_made(tmp_path):
    speed = measure_disk(tmp_path / "new" / "run", file_bytes=SMALL, seconds=0.1)
    assert speed.path == str(tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_turn_costs_what_the_mix_takes_longer():
    """A disk that reads and writes 100 MB/s and seeks for 8 ms between two blocks."""
    seek = 0.008
    mix = 2 * BLOCK_BYTES / (2 * BLOCK_BYTES / 1e8 + 2 * seek)
    speed = DiskSpeed(
        path="/", direct=True, read_bytes_per_second=1e8, write_bytes_per_second=1e8,
        mix_bytes_per_second=mix, sync_seconds=0.02, free_bytes=0,
    )  # fmt: skip
    assert speed.turnaround_seconds == pytest.approx(seek)
    faster = speed.model_copy(update={"mix_bytes_per_second": 1.2e8})  # both at once
    assert faster.turnaround_seconds == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs to try")
def test_tmpfs_is_measured_without_direct_io():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        speed = measure_disk(folder, file_bytes=SMALL, seconds=0.1)
        assert os.listdir(folder) == []
    assert speed.filesystem == "tmpfs"
    assert not speed.direct


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_refuses_o_direct_is_measured_buffered(tmp_path, monkeypatch, refused):
    real_open, real_write = os.open, os.pwrite
    direct = set()

    def fake_open(path, flags, *rest, **more):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, *rest, **more)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def fake_write(fd, *rest):
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, *rest)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "pwrite", fake_write)
    monkeypatch.setattr(disk_module, "library_path", lambda: None)
    speed = measure_disk(tmp_path, file_bytes=SMALL, seconds=0.1)
    assert not speed.direct
    assert speed.write_bytes_per_second > 0


def test_reads_and_writes_of_the_mix_touch_different_halves(tmp_path, monkeypatch):
    touched = {"read": set(), "write": set()}
    real_read, real_write = os.preadv, os.pwrite
    passes = []

    def read(fd, buffers, offset):
        touched["read"].add(offset)
        return real_read(fd, buffers, offset)

    def write(fd, data, offset):
        if len(data) == BLOCK_BYTES:
            touched["write"].add(offset)
        return real_write(fd, data, offset)

    real_rate = disk_module._rate

    def rate(step, blocks, seconds, file):
        for offsets in touched.values():
            offsets.clear()
        value = real_rate(step, blocks, seconds, file)
        passes.append({kind: set(offsets) for kind, offsets in touched.items()})
        return value

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(disk_module, "library_path", lambda: None)
    monkeypatch.setattr(disk_module, "_rate", rate)
    measure_disk(tmp_path, file_bytes=6 * BLOCK_BYTES, seconds=60)
    every = {n * BLOCK_BYTES for n in range(6)}
    halves = {n * BLOCK_BYTES for n in range(3)}
    assert passes == [
        {"read": set(), "write": every},
        {"read": every, "write": set()},
        {"read": halves, "write": every - halves},
    ]


def test_a_read_only_folder_is_an_error_with_a_hint():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)  # root may write anywhere
            with pytest.raises(DiskError, match=folder) as caught:
                measure_disk(folder, file_bytes=SMALL)
        finally:
            os.seteuid(user)
    assert "may write" in caught.value.hint
    assert caught.value.exit_code == 4


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="is a file"):
            measure_disk(path)


def test_a_disk_that_fails_while_measured_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # a real EFBIG from the kernel
    try:
        with pytest.raises(DiskError, match="File too large"):
            measure_disk(tmp_path, file_bytes=SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_says_so(tmp_path, monkeypatch):
    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match="No space left") as caught:
        measure_disk(tmp_path, file_bytes=SMALL)
    assert "free some space" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_little_free_space_means_a_smaller_file_or_an_error(tmp_path, monkeypatch):
    sizes = []
    real = os.posix_fallocate
    place = locate(tmp_path)

    def allocate(fd, offset, size):
        sizes.append(size)
        return real(fd, offset, size)

    def with_free(free):
        return lambda path, roots: replace(place, free_bytes=free)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(disk_module, "locate", with_free(200 << 20))
    measure_disk(tmp_path, seconds=0.1)
    assert sizes == [24 << 20]
    monkeypatch.setattr(disk_module, "locate", with_free(20 << 20))
    with pytest.raises(DiskError, match="too little"):
        measure_disk(tmp_path)


def test_a_killed_measurement_leaves_no_file(tmp_path):
    script = (
        "import os, signal, packmule.probe.disk as d\n"
        "def die(*a): os.kill(os.getpid(), signal.SIGKILL)\n"
        "d._rate = die\n"
        f"d.measure_disk({str(tmp_path)!r}, file_bytes={SMALL})\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_the_deepest_and_latest_mount_holds_a_path(make_tree, tmp_path):
    lines = [
        "20 1 8:1 / / rw - ext4 /dev/root rw",
        f"21 20 8:2 / {tmp_path} rw - ext4 /dev/first rw",
        f"22 21 8:3 / {tmp_path} rw - xfs /dev/second rw",
        f"23 20 8:4 / {tmp_path}-other rw - xfs /dev/other rw",
    ]
    tree = make_tree({"self/mountinfo": "\n".join(lines) + "\n"})
    assert mount_of(tmp_path / "a", tree).source == "/dev/second"
    assert mount_of(tmp_path.parent, tree).source == "/dev/root"
    assert locate(tmp_path, tree).device == "/dev/second xfs"


def test_a_place_without_a_listed_mount_goes_by_its_number(tmp_path):
    place = locate(tmp_path, Roots(str(tmp_path), str(tmp_path)))
    number = os.stat(tmp_path).st_dev
    assert place.device == f"{os.major(number)}:{os.minor(number)}"
