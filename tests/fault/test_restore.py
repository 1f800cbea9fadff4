"""Going back to a snapshot: from every kind of damage, and when the power goes on the way."""

from __future__ import annotations

import random
import zlib

import pytest
from known_run import (
    LAYOUT,
    RUN,
    Promise,
    Scenario,
    check,
    compare,
    contents,
    new_store,
    progress,
    train,
    write_all,
)
from recording_disk import RecordingDisk

from packmule.checkpoint.snapshots import newest, restore, snapshot
from packmule.checkpoint.verify import verify
from packmule.errors import DamagedFile
from packmule.tiers.disk import aligned_buffer

SNAPSHOT_STEP, LAST_STEP = 2, 5
HEAD, STATE = RUN / "HEAD.json", RUN / "state.bin"


def run_with_snapshot(chunk_bytes: int = LAYOUT.chunk_bytes) -> RecordingDisk:
    """A run at step 5 with a snapshot of step 2, all durable."""
    disk = RecordingDisk()
    train(disk, Scenario(SNAPSHOT_STEP, 1, SNAPSHOT_STEP, streamed=True), Promise())
    store = new_store(disk)
    store.load()
    if chunk_bytes != store.layout.chunk_bytes:
        store.rechunk(chunk_bytes, aligned_buffer(chunk_bytes))
        store.commit(progress(SNAPSHOT_STEP))
        store.load()
        store.rechunk(LAYOUT.chunk_bytes, aligned_buffer(chunk_bytes))
    for step in range(SNAPSHOT_STEP + 1, LAST_STEP + 1):
        write_all(store, step, read_first=True)
    store.commit(progress(LAST_STEP))
    store.close()
    return disk


def flip(disk: RecordingDisk, path: object, rng: random.Random) -> None:
    file = disk.file(path)  # type: ignore[arg-type]
    file.live[rng.randrange(len(file.live))] ^= 1 << rng.randrange(8)
    file.sync()


def truncate(disk: RecordingDisk, path: object, rng: random.Random) -> None:
    file = disk.file(path)  # type: ignore[arg-type]
    file.resize(rng.randrange(len(file.live)))
    file.sync()


def remove(disk: RecordingDisk, path: object, rng: random.Random) -> None:
    disk.remove(path)  # type: ignore[arg-type]
    disk.sync_folder(RUN)


def scratch(disk: RecordingDisk, path: object, rng: random.Random) -> None:
    """Damage every chunk of both slots."""
    file = disk.file(path)  # type: ignore[arg-type]
    file.live[:] = bytes(byte ^ 255 for byte in file.live)
    file.sync()


DAMAGE = (
    ("HEAD.json flipped", flip, HEAD),
    ("HEAD.json truncated", truncate, HEAD),
    ("HEAD.json removed", remove, HEAD),
    ("state.bin damaged", scratch, STATE),
    ("state.bin truncated", truncate, STATE),
    ("state.bin removed", remove, STATE),
    ("nothing damaged", lambda *_: None, STATE),
)


@pytest.mark.parametrize(("damage", "path"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_the_newest_snapshot_brings_the_run_back(damage: object, path: object, seed: int) -> None:
    disk = run_with_snapshot()
    damage(disk, path, random.Random(seed))  # type: ignore[operator]
    found = newest(disk, RUN, zlib.crc32)
    assert found == RUN / f"checkpoint-{SNAPSHOT_STEP}"
    head = restore(new_store(disk), found, aligned_buffer(LAYOUT.chunk_bytes))
    assert head.step == SNAPSHOT_STEP and head.cursor == 4 * SNAPSHOT_STEP
    check(disk, Promise(SNAPSHOT_STEP, SNAPSHOT_STEP, {SNAPSHOT_STEP}))
    train(disk, Scenario(8, 1, None, streamed=True), Promise())
    check(disk, Promise(8, 8, {SNAPSHOT_STEP}))


def test_a_run_cut_into_other_chunks_is_restored_too() -> None:
    disk = run_with_snapshot(chunk_bytes=8192)
    store = new_store(disk)
    store.load()
    store.rechunk(8192, aligned_buffer(8192))
    store.commit(progress(LAST_STEP))
    restore(new_store(disk), RUN / f"checkpoint-{SNAPSHOT_STEP}", aligned_buffer(8192))
    check(disk, Promise(SNAPSHOT_STEP, SNAPSHOT_STEP, {SNAPSHOT_STEP}))


@pytest.mark.parametrize(("damage", "path"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_power_lost_while_restoring_loses_no_snapshot_and_hides_no_damage(
    damage: object, path: object, seed: int
) -> None:
    """An undamaged run stays as it was or is restored. A damaged one is restored, or still
    seen to be damaged (or empty, if HEAD was removed), and then restores."""
    rng = random.Random(seed)
    disk = run_with_snapshot()
    damage(disk, path, rng)  # type: ignore[operator]
    states = []

    def cut(now: RecordingDisk) -> None:
        states.extend((now.log[-1], now.after_power_loss(rng)) for _ in range(4))

    again = RecordingDisk(disk.root, after=cut)
    restore(new_store(again), RUN / f"checkpoint-{SNAPSHOT_STEP}", aligned_buffer(LAYOUT.chunk_bytes))
    assert len(states) >= 80
    for operation, left in states:
        try:
            check(left, Promise(SNAPSHOT_STEP, LAST_STEP, {SNAPSHOT_STEP}))
        except DamagedFile:
            assert path is HEAD or damage is not DAMAGE[-1][1], operation
        except AssertionError:
            assert damage is remove and path is HEAD and not left.exists(HEAD), operation
        found = newest(left, RUN, zlib.crc32)
        assert found is not None, operation
        restore(new_store(left), found, aligned_buffer(LAYOUT.chunk_bytes))
        check(left, Promise(SNAPSHOT_STEP, SNAPSHOT_STEP, {SNAPSHOT_STEP}))


def test_every_damaged_chunk_is_listed_by_name(seed: int) -> None:
    rng = random.Random(seed)
    disk = run_with_snapshot()
    store = new_store(disk)
    head = store.load()
    assert head is not None
    everything = [(b, i) for b in range(len(LAYOUT.blocks)) for i in range(len(LAYOUT.chunks(b)))]
    damaged = sorted(rng.sample(everything, 4))
    file = disk.file(STATE)
    for block, index in damaged:
        start = LAYOUT.chunk_offset(block, head.blocks[block].slot, index)
        file.live[start + rng.randrange(LAYOUT.chunks(block)[index].bytes)] ^= 1 << rng.randrange(8)
    verdict = verify(disk, RUN, zlib.crc32)
    assert (verdict.kind, verdict.step) == ("run", LAST_STEP)
    assert verdict.checked_bytes == len(LAYOUT.planes) * LAYOUT.plane_bytes
    assert len(verdict.damage) == len(damaged)
    for (block, index), sentence in zip(damaged, verdict.damage, strict=True):
        plane, piece = divmod(index, LAYOUT.pieces(block))
        name = f"block {LAYOUT.blocks[block].name}, plane {LAYOUT.planes[plane]}, chunk {piece} "
        assert str(STATE) in sentence and name in sentence
    with pytest.raises(DamagedFile):
        store.verify(aligned_buffer(LAYOUT.chunk_bytes))


def test_the_slot_that_head_does_not_name_may_hold_anything(seed: int) -> None:
    rng = random.Random(seed)
    disk = run_with_snapshot()
    head = new_store(disk).load()
    assert head is not None
    for block, entry in enumerate(head.blocks):
        start = LAYOUT.offset(block, 1 - entry.slot)
        disk.file(STATE).live[start : start + LAYOUT.block_bytes(block)] = rng.randbytes(
            LAYOUT.block_bytes(block)
        )
    assert verify(disk, RUN, zlib.crc32).damage == ()
    check(disk, Promise(LAST_STEP, LAST_STEP))


def test_a_damaged_run_makes_no_snapshot_and_keeps_the_old_one(seed: int) -> None:
    disk = run_with_snapshot()
    scratch(disk, STATE, random.Random(seed))
    store = new_store(disk)
    store.load()
    with pytest.raises(DamagedFile):
        snapshot(store, aligned_buffer(LAYOUT.chunk_bytes))
    assert "checkpoint-5" not in disk.list(RUN) and "checkpoint-5.tmp" not in disk.list(RUN)
    assert newest(disk, RUN, zlib.crc32) == RUN / f"checkpoint-{SNAPSHOT_STEP}"


def test_a_damaged_snapshot_is_named_and_not_restored(seed: int) -> None:
    disk = run_with_snapshot()
    path = RUN / f"checkpoint-{SNAPSHOT_STEP}"
    flip(disk, path / "state.bin", random.Random(seed))
    verdict = verify(disk, path, zlib.crc32)
    assert verdict.kind == "snapshot" and len(verdict.damage) == 1 and str(path) in verdict.damage[0]
    with pytest.raises(DamagedFile, match=r"checkpoint-2/state\.bin: block"):
        restore(new_store(disk), path, aligned_buffer(LAYOUT.chunk_bytes))
    store = new_store(disk)  # the good run was not touched
    head = store.load()
    assert head is not None and head.step == LAST_STEP
    compare(store, LAST_STEP)


def test_a_snapshot_is_taken_of_the_commit_not_of_what_came_after() -> None:
    disk = run_with_snapshot()
    store = new_store(disk)
    store.load()
    write_all(store, LAST_STEP + 1, read_first=True)
    snapshot(store, aligned_buffer(LAYOUT.chunk_bytes))
    write_all(store, LAST_STEP + 2, read_first=True)
    check(disk, Promise(LAST_STEP, LAST_STEP, {LAST_STEP, SNAPSHOT_STEP}))
    compare(store, LAST_STEP + 2)
    assert contents(LAST_STEP) != contents(LAST_STEP + 2)
