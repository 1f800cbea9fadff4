"""StateStore: which slot is written, what a read gives, when a commit is allowed."""

from __future__ import annotations

import errno
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from known_run import LAYOUT, contents, new_store, progress, write_all
from recording_disk import RecordingDisk

from packmule.checkpoint.head import HEAD_NAME
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.store import StateStore
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.tiers.disk import PosixDisk, aligned_buffer

BLOCKS = range(len(LAYOUT.blocks))
CHUNKS = len(LAYOUT.chunks(0))


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """A run with step 0 committed, on the machine's disk."""
    result = StateStore(PosixDisk(), tmp_path / "run", LAYOUT, crc32)
    result.create_files()
    write_all(result, 0, read_first=False)
    result.commit(progress(0))
    return result


def chunk(store: StateStore, block: int, index: int, verify: bool = True) -> bytes:
    buffer = aligned_buffer(LAYOUT.chunk_bytes)
    store.read(block, index, buffer, verify)
    return bytes(buffer[: LAYOUT.chunks(block)[index].bytes])


def write(store: StateStore, block: int, index: int, data: bytes) -> None:
    buffer = aligned_buffer(len(data))
    buffer[:] = data
    store.write(block, index, buffer)


def test_a_slot_head_names_is_never_written(tmp_path: Path, seed: int) -> None:
    """Random updates and commits, against the rule stated in one line."""
    rng = random.Random(seed)
    disk = RecordingDisk()
    store = new_store(disk)
    store.create_files()
    write_all(store, 0, read_first=False)
    named: list[int | None] = [None] * len(BLOCKS)
    current = [0] * len(BLOCKS)
    for step in range(1, 60):
        for block in BLOCKS:
            if rng.random() < 0.6:
                target = store.begin(block)
                assert target == (1 - current[block] if named[block] == current[block] else current[block])
                assert target != named[block]
                current[block] = target
                for index, data in enumerate(contents(step)[block]):
                    write(store, block, index, data)
                store.end(block)
        if rng.random() < 0.4:
            head = store.commit(progress(step))
            named = [entry.slot for entry in head.blocks]
            assert named == current


def test_a_read_gives_the_newest_bytes_of_each_chunk(store: StateStore) -> None:
    old, new, newer = contents(0)[0], contents(1)[0], contents(2)[0]
    store.begin(0)  # into the other slot
    for index in range(CHUNKS):
        assert chunk(store, 0, index) == old[index]
        write(store, 0, index, new[index])
        assert chunk(store, 0, index) == new[index]
        assert [chunk(store, 0, later) for later in range(index + 1, CHUNKS)] == list(old[index + 1 :])
    store.end(0)
    store.begin(0)  # in place
    for index in range(CHUNKS):
        assert chunk(store, 0, index) == new[index]
        write(store, 0, index, newer[index])
        assert chunk(store, 0, index) == newer[index]
    store.end(0)
    assert [chunk(store, 0, index) for index in range(CHUNKS)] == list(newer)


def test_a_reader_keeps_the_commit_while_the_store_goes_on(store: StateStore) -> None:
    with store.reader() as reader:
        for step in (1, 2):
            write_all(store, step, read_first=True)
        buffer = aligned_buffer(LAYOUT.chunk_bytes)
        for block in BLOCKS:
            for index, data in enumerate(contents(0)[block]):
                reader.read(block, index, buffer)
                assert buffer[: len(data)] == data


def test_a_plane_reads_as_its_tensors(store: StateStore) -> None:
    pieces = LAYOUT.pieces(0)
    buffer = aligned_buffer(LAYOUT.blocks[0].plane_bytes)
    with store.reader() as reader:
        reader.read_plane(0, "m", buffer)
    assert buffer == b"".join(contents(0)[0][pieces : 2 * pieces])


def test_uncommitted_updates_are_gone_after_a_restart(store: StateStore) -> None:
    write_all(store, 1, read_first=True)
    again = StateStore(store.disk, store.folder, LAYOUT, crc32)
    head = again.load()
    assert head is not None and head == store.head and head.step == 0 and head.cursor == 0
    assert [chunk(again, 1, index) for index in range(len(contents(0)[1]))] == list(contents(0)[1])


def test_an_incomplete_update_neither_ends_nor_commits(store: StateStore) -> None:
    store.begin(0)
    for index in range(CHUNKS - 1):
        write(store, 0, index, contents(1)[0][index])
    with pytest.raises(
        RuntimeError, match=rf"block 0: chunks \[{CHUNKS - 1}\] of the update are not written"
    ):
        store.end(0)
    with pytest.raises(RuntimeError, match=r"commit while blocks \[0\] are being updated"):
        store.commit(progress(1))
    with pytest.raises(RuntimeError, match="being updated already"):
        store.begin(0)


def test_a_short_buffer_is_refused(store: StateStore) -> None:
    store.begin(0)
    with pytest.raises(RuntimeError, match="has only 100 bytes"):
        store.write(0, 0, memoryview(bytearray(100)))


def test_nothing_commits_before_every_block_is_written(tmp_path: Path) -> None:
    store = StateStore(PosixDisk(), tmp_path / "run", LAYOUT, crc32)
    with pytest.raises(RuntimeError, match="no files open"):
        store.read(0, 0, aligned_buffer(4096))
    store.create_files()
    with pytest.raises(RuntimeError, match="never been written"):
        store.read(0, 0, aligned_buffer(4096))
    with pytest.raises(RuntimeError, match="before every block"):
        store.commit(progress(0))
    assert store.load() is None


def test_a_folder_that_holds_a_run_is_not_created_again(store: StateStore) -> None:
    with pytest.raises(ConfigError, match="already holds a run"):
        StateStore(store.disk, store.folder, LAYOUT, crc32).create_files()


def test_creation_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.bin").write_bytes(b"unfinished")
    store = StateStore(PosixDisk(), tmp_path / "run", LAYOUT, crc32)
    store.create_files()
    write_all(store, 0, read_first=False)
    assert store.commit(progress(0)).step == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "the state is float32; this job needs float64"),
        ({"planes": ("master",)}, "the planes are master, m, v; this job needs master"),
        ({"blocks": LAYOUT.blocks[:2]}, "has 3 blocks; this job's model has 2"),
        (
            {"blocks": (LAYOUT.blocks[0], replace(LAYOUT.blocks[2], name="layer0"), LAYOUT.blocks[2])},
            "block layer0 has other tensors",
        ),
    ],
)
def test_a_state_of_another_job_is_refused(store: StateStore, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StateStore(store.disk, store.folder, replace(LAYOUT, **change), crc32).load()


def test_another_chunk_size_is_taken_up_and_changed(store: StateStore, seed: int) -> None:
    """The chunk size is how a run is cut, not what it holds: HEAD's stays until rechunk."""
    buffer = aligned_buffer(1 << 14)
    rng = random.Random(seed)
    for chunk_bytes in rng.choices((4096, 8192, 16384), k=8):
        other = StateStore(store.disk, store.folder, LAYOUT.with_chunk_bytes(1 << 20), crc32)
        assert other.load() is not None
        assert other.layout.chunk_bytes == store.layout.chunk_bytes
        other.rechunk(chunk_bytes, buffer)
        other.verify(buffer)
        other.commit(progress(0))
        for block in BLOCKS:
            found = b""
            for index, piece in enumerate(other.layout.chunks(block)):
                other.read(block, index, buffer)
                found += bytes(buffer[: piece.bytes])
            assert found == b"".join(contents(0)[block])
        store = other


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_after_a_failed_commit_nothing_more_is_written(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "injected")

    write_all(store, 1, read_first=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DiskError, match="cannot sync"):
            store.commit(progress(1))
    for use in (lambda: store.commit(progress(1)), lambda: store.begin(0)):
        with pytest.raises(DiskError, match="an earlier commit failed") as caught:
            use()
        assert "resumes" in caught.value.hint
    again = StateStore(store.disk, store.folder, LAYOUT, crc32)
    head = again.load()
    assert head is not None and head.step == 0
    again.verify(aligned_buffer(LAYOUT.chunk_bytes))


def test_damage_on_the_way_to_the_disk_shows(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is of what the caller handed over, not of what arrived."""
    write_to_disk = PosixDisk.write

    def faulty(self: PosixDisk, handle: object, buffer: memoryview, offset: int) -> None:
        wrong = aligned_buffer(len(buffer))
        wrong[:] = buffer
        wrong[17] ^= 4
        write_to_disk(self, handle, wrong, offset)  # type: ignore[arg-type]

    store.begin(2)
    monkeypatch.setattr(PosixDisk, "write", faulty)
    write(store, 2, 1, contents(1)[2][1])
    with pytest.raises(DamagedFile, match="block head, plane m, chunk 0"):
        chunk(store, 2, 1)
    chunk(store, 2, 1, verify=False)


def test_an_io_thread_and_a_main_thread_can_share_a_store(store: StateStore) -> None:
    """One thread streams updates of its blocks while another reads and verifies the rest."""
    failures: list[BaseException] = []

    def stream() -> None:
        try:
            for step in range(1, 30):
                store.begin(0)
                for index, data in enumerate(contents(step)[0]):
                    write(store, 0, index, data)
                store.end(0)
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=stream)
    worker.start()
    while worker.is_alive():
        for block in (1, 2):
            for index, data in enumerate(contents(0)[block]):
                assert chunk(store, block, index) == data
    worker.join(timeout=60)
    assert not failures
    head = store.commit(progress(29))
    assert [chunk(store, 0, index) for index in range(CHUNKS)] == list(contents(29)[0])
    assert head.step == 29 and (store.folder / HEAD_NAME).exists()


def test_progress_survives_as_it_was_given(store: StateStore) -> None:
    write_all(store, 1, read_first=True)
    given = progress(1)
    store.commit(given)
    head = StateStore(store.disk, store.folder, LAYOUT, crc32).load()
    assert head is not None
    assert {name: getattr(head, name) for name in type(given).model_fields} == dict(given)
    # A Head is a Progress: committing with one carries nothing else of it over.
    assert store.commit(head).blocks == head.blocks


def test_a_snapshot_is_not_a_run(store: StateStore) -> None:
    single: StateLayout = LAYOUT.with_slots(1)
    with pytest.raises(ConfigError, match="this is a snapshot"):
        StateStore(store.disk, store.folder, single, crc32).load()
