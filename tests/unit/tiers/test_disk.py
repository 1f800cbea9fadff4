"""PosixDisk: whole transfers, alignment, and errors that name path, bytes and a way out."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from packmule.errors import DamagedFile, DiskError
from packmule.tiers.disk import PAGE, PosixDisk, aligned_buffer, ensure_folder, remove_folder, replace_file


def filled(size: int, seed: int) -> memoryview:
    buffer = aligned_buffer(size)
    buffer[:] = np.random.default_rng(seed).bytes(size)
    return buffer


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read(tmp_path: Path, direct: bool, seed: int) -> None:
    disk, path = PosixDisk(direct), tmp_path / "file"
    disk.create(path, 64 * PAGE)
    data, found = filled(5 * PAGE, seed), aligned_buffer(8 * PAGE)
    handle = disk.open(path, write=True)
    disk.write(handle, data, 7 * PAGE)
    disk.sync(handle)
    disk.read_into(handle, found, 6 * PAGE)
    disk.close(handle)
    assert found == bytes(PAGE) + bytes(data) + bytes(2 * PAGE)
    assert disk.size(path) == 64 * PAGE


def test_created_files_are_allocated(tmp_path: Path) -> None:
    PosixDisk().create(tmp_path / "file", 256 * PAGE)
    assert (tmp_path / "file").stat().st_blocks * 512 >= 256 * PAGE


def test_direct_handles_say_so_and_refuse_misaligned_transfers(tmp_path: Path) -> None:
    disk, path = PosixDisk(), tmp_path / "file"
    disk.create(path, 4 * PAGE)
    handle = disk.open(path, write=True)
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.close(number)
        assert handle.direct
    except OSError:
        assert not handle.direct
        return
    page = aligned_buffer(2 * PAGE)
    for buffer, offset in ((page[:PAGE], 512), (page[:1000], 0), (page[8 : PAGE + 8], 0)):
        with pytest.raises(AssertionError, match="direct transfers"):
            disk.write(handle, buffer, offset)
        with pytest.raises(AssertionError, match="direct transfers"):
            disk.read_into(handle, buffer, offset)
    disk.close(handle)


@pytest.mark.parametrize("direct", [True, False])
def test_short_transfers_are_carried_on(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    disk, path = PosixDisk(direct), tmp_path / "file"
    disk.create(path, 8 * PAGE)
    handle = disk.open(path, write=True)
    read, write, calls = os.preadv, os.pwritev, []
    most = 2 * PAGE if handle.direct else 1000

    def short_read(number: int, views: list[memoryview], offset: int) -> int:
        calls.append("read")
        return read(number, [views[0][:most]], offset)

    def short_write(number: int, views: list[memoryview], offset: int) -> int:
        calls.append("write")
        # A torn write reports bytes off the page grid.
        return min(write(number, [views[0][:most]], offset), most - 100)

    monkeypatch.setattr(os, "preadv", short_read)
    monkeypatch.setattr(os, "pwritev", short_write)
    data, found = filled(8 * PAGE, seed), aligned_buffer(8 * PAGE)
    disk.write(handle, data, 0)
    disk.read_into(handle, found, 0)
    disk.close(handle)
    assert found == data
    assert calls.count("read") > 3 and calls.count("write") > 3


def test_a_device_that_accepts_nothing_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = PosixDisk(), tmp_path / "file"
    disk.create(path, PAGE)
    handle = disk.open(path, write=True)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(DiskError, match="cannot write 4,096 bytes"):
        disk.write(handle, aligned_buffer(PAGE), 0)
    disk.close(handle)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kept", [0, 100, PAGE, PAGE + 512, 2 * PAGE - 1])
def test_a_truncated_file_is_named_with_what_is_missing(tmp_path: Path, direct: bool, kept: int) -> None:
    disk, path = PosixDisk(direct), tmp_path / "state.bin"
    disk.create(path, 2 * PAGE)
    os.truncate(path, kept)
    handle = disk.open(path, write=False)
    with pytest.raises(DamagedFile, match=rf"state.bin ends at byte {kept:,}, {2 * PAGE - kept:,} bytes too"):
        disk.read_into(handle, aligned_buffer(2 * PAGE), 0)
    disk.close(handle)


def test_a_file_that_does_not_fit_says_how_much_is_missing_and_leaves_nothing(tmp_path: Path) -> None:
    disk, path = PosixDisk(), tmp_path / "state.bin"
    size = disk.free_bytes(tmp_path) + (1 << 40)
    with pytest.raises(DiskError) as caught:
        disk.create(path, size)
    assert str(path) in caught.value.cause and f"{size:,} bytes to write" in caught.value.cause
    assert "free at least" in caught.value.hint
    assert not path.exists()


def test_a_disk_that_fills_up_while_allocating_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match="the disk is full: 8,192 bytes to write"):
        PosixDisk().create(tmp_path / "state.bin", 2 * PAGE)
    assert os.listdir(tmp_path) == []


def test_a_full_device_is_a_disk_error() -> None:
    with pytest.raises(DiskError, match="/dev/full: the disk is full: 5 bytes to write"):
        PosixDisk().write_bytes(Path("/dev/full"), b"hello")


def test_the_file_size_limit_is_explained(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from packmule.tiers.disk import PosixDisk\n"
        "from packmule.errors import DiskError\n"
        "try: PosixDisk().create(Path(sys.argv[1]), 1 << 20)\n"
        "except DiskError as error: print(error)\n"
    )
    limit = 1 << 19
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state.bin")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "state.bin: cannot allocate 1,048,576 bytes" in done.stdout, done.stderr
    assert "ulimit -f" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.EIO, "dmesg"), (errno.EROFS, "read-write"), (errno.EDQUOT, "check the disk")]
)
def test_a_failed_sync_is_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, "injected")

    disk, path = PosixDisk(), tmp_path / "file"
    disk.write_bytes(path, b"hello")
    handle = disk.open(path, write=True)
    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(os, "fsync", fail)
    for sync in (
        lambda: disk.sync(handle),
        lambda: disk.sync_file(path),
        lambda: disk.sync_folder(tmp_path),
    ):
        with pytest.raises(DiskError, match="cannot sync") as caught:
            sync()
        assert hint in caught.value.hint
    disk.close(handle)


@pytest.mark.parametrize(
    "call",
    [
        lambda disk, path: disk.open(path, write=True),
        lambda disk, path: disk.read_bytes(path),
        lambda disk, path: disk.sync_file(path),
        lambda disk, path: disk.sync_folder(path),
        lambda disk, path: disk.rename(path, path.with_name("other")),
        lambda disk, path: disk.remove(path),
        lambda disk, path: disk.size(path),
        lambda disk, path: disk.list(path),
        lambda disk, path: disk.free_bytes(path),
        lambda disk, path: disk.write_bytes(path / "below", b""),
        lambda disk, path: disk.create(path / "below", 1),
        lambda disk, path: disk.make_folder(path / "below"),
    ],
)
def test_a_missing_path_is_named(tmp_path: Path, call: object) -> None:
    with pytest.raises(DiskError, match=r"absent.*No such file") as caught:
        call(PosixDisk(), tmp_path / "absent")  # type: ignore[operator]
    assert caught.value.exit_code == 4


def test_replace_file_leaves_only_the_new_contents(tmp_path: Path) -> None:
    disk, path = PosixDisk(), tmp_path / "HEAD.json"
    for data in (b"old", b"new and longer", b""):
        replace_file(disk, path, data)
        assert path.read_bytes() == data
        assert os.listdir(tmp_path) == ["HEAD.json"]


def test_every_folder_above_is_synced_even_if_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed may have made any of them without its sync."""
    synced: list[Path] = []
    monkeypatch.setattr(PosixDisk, "sync_folder", lambda _, path: synced.append(path))
    path = tmp_path / "a" / "b"
    for _ in range(2):
        synced.clear()
        ensure_folder(PosixDisk(), path)
        assert synced == list(reversed(path.parents))


def test_folders_are_made_with_their_parents_and_removed_with_their_files(tmp_path: Path) -> None:
    disk, path = PosixDisk(), tmp_path / "a" / "b" / "c"
    ensure_folder(disk, path)
    ensure_folder(disk, path)
    disk.write_bytes(path / "file", b"x")
    assert disk.list(path) == ("file",)
    remove_folder(disk, path)
    assert not disk.exists(path) and disk.exists(path.parent)
