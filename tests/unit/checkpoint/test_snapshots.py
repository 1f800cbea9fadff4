"""Snapshots on the machine's disk: which there are, which go, what is passed over."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest
from known_run import LAYOUT, compare, progress, write_all

from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.snapshots import newest, remove_snapshot, restore, rotate, snapshot, snapshots
from packmule.checkpoint.store import StateStore
from packmule.checkpoint.verify import verify
from packmule.errors import ConfigError, DiskError
from packmule.tiers.disk import PosixDisk, aligned_buffer

DISK = PosixDisk()


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """A run with snapshots of steps 0, 9, 10 and 11."""
    result = StateStore(DISK, tmp_path / "run", LAYOUT, crc32)
    result.create_files()
    write_all(result, 0, read_first=False)
    for step in (0, 9, 10, 11):
        write_all(result, step, read_first=False)
        result.commit(progress(step))
        snapshot(result, aligned_buffer(LAYOUT.chunk_bytes))
    return result


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in snapshots(DISK, run, crc32)]


def test_snapshots_are_in_order_of_step_not_of_name(store: StateStore) -> None:
    assert steps(store.folder) == [0, 9, 10, 11]
    assert newest(DISK, store.folder, crc32) == store.folder / "checkpoint-11"


def test_a_snapshot_holds_one_slot_of_every_block(store: StateStore) -> None:
    for step in (0, 9, 10, 11):
        path = store.folder / f"checkpoint-{step}"
        assert sorted(file.name for file in path.iterdir()) == ["HEAD.json", "state.bin"]
        assert (path / "state.bin").stat().st_size == LAYOUT.bytes // 2
        with StateReader.open(DISK, path, crc32) as reader:
            assert reader.head.step == step
            compare(reader, step)
        verdict = verify(DISK, path, crc32)
        assert (verdict.kind, verdict.step, verdict.damage) == ("snapshot", step, ())


def test_rotate_keeps_the_newest_and_clears_what_is_unfinished(store: StateStore) -> None:
    run = store.folder
    (run / "checkpoint-12.tmp").mkdir()
    (run / "checkpoint-12.tmp" / "state.bin").write_bytes(b"unfinished")
    (run / "checkpoint-11" / "HEAD.json").unlink()
    (run / "checkpoint-notes").mkdir()
    left = rotate(DISK, run, 2, crc32)
    assert [path.name for path in left] == ["checkpoint-9", "checkpoint-10"]
    assert steps(run) == [9, 10]
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-notes",
    ]
    asked = []

    def reading(data: memoryview) -> int:
        asked.append(len(data))
        return crc32(data)

    assert rotate(DISK, run, 2, reading, left[:1]) == left and len(asked) == 1
    rotate(DISK, run, 0, crc32)
    assert steps(run) == []


@pytest.mark.parametrize("name", ["HEAD.json", "state.bin"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_snapshot_that_is_not_whole_is_passed_over(store: StateStore, name: str, damage: str) -> None:
    path = store.folder / "checkpoint-11" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert newest(DISK, store.folder, crc32) == store.folder / "checkpoint-10"


def test_a_snapshot_of_the_same_step_is_replaced(store: StateStore) -> None:
    (store.folder / "checkpoint-11" / "state.bin").write_bytes(b"damaged")
    assert snapshot(store, aligned_buffer(LAYOUT.chunk_bytes)) == store.folder / "checkpoint-11"
    assert verify(DISK, store.folder / "checkpoint-11", crc32).damage == ()


def test_a_snapshot_that_does_not_fit_leaves_nothing(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(store, 12, read_first=False)
    store.commit(progress(12))
    monkeypatch.setattr(PosixDisk, "free_bytes", lambda *_: LAYOUT.bytes // 2 - 1)
    with pytest.raises(DiskError, match="the disk is full"):
        snapshot(store, aligned_buffer(LAYOUT.chunk_bytes))
    assert steps(store.folder) == [0, 9, 10, 11]
    assert not (store.folder / "checkpoint-12.tmp").exists()


def test_progress_is_reported_up_to_the_whole(store: StateStore) -> None:
    calls: list[tuple[int, int]] = []
    buffer = aligned_buffer(LAYOUT.chunk_bytes)
    for operation in (
        lambda: snapshot(store, buffer, lambda *c: calls.append(c)),
        lambda: store.verify(buffer, lambda *c: calls.append(c)),
        lambda: verify(DISK, store.folder, crc32, buffer, lambda *c: calls.append(c)),
    ):
        calls.clear()
        operation()
        assert calls[-1] == (LAYOUT.bytes // 2, LAYOUT.bytes // 2)
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_snapshot_of_another_model_is_not_restored(store: StateStore, tmp_path: Path) -> None:
    small = StateStore(
        DISK, tmp_path / "other", LAYOUT.__class__(LAYOUT.blocks[:1], ("master",), "float32", 4096), crc32
    )
    with pytest.raises(ConfigError, match="does not hold the state of this job"):
        restore(small, store.folder / "checkpoint-9", aligned_buffer(4096))


def test_a_folder_without_commit_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no HEAD\.json"):
        verify(DISK, tmp_path, crc32)


def test_removing_takes_the_head_first(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    remove = PosixDisk.remove
    monkeypatch.setattr(
        PosixDisk, "remove", lambda self, path: (order.append(path.name), remove(self, path))[1]
    )
    remove_snapshot(DISK, store.folder / "checkpoint-9")
    assert order == ["HEAD.json", "state.bin", "checkpoint-9"]
