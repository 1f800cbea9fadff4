"""Rows, the validation split and micro-batches: every token once, whatever the order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packmule.data.batches import Batches
from packmule.data.files import Reader
from packmule.data.rows import Chosen, Rows, RowsMeta, best_fit, validation_documents, write_rows
from packmule.data.store import StoreMeta, TokenStore
from packmule.errors import ConfigError, DamagedFile, DataError
from packmule.spec.batch import IGNORED


def made_store(
    folder: Path, sizes: list[int], rng: np.random.Generator, trained: float | None = None
) -> TokenStore:
    """A store of documents of the given sizes with random ids; `trained`: the share that carries loss."""
    folder.mkdir()
    tokens = rng.integers(0, 60_000, sum(sizes)).astype("<u2")
    tokens.tofile(folder / "tokens.bin")
    np.cumsum([0, *sizes]).astype("<i8").tofile(folder / "documents.bin")
    meta = StoreMeta(
        key="k", dtype="<u2", vocab=60_000, tokenizer_sha256="t", add_bos=False, bos=None, eos=0,
        sources=(), documents=len(sizes), tokens=sum(sizes), masked=trained is not None,
    )  # fmt: skip
    if trained is not None:
        bits = rng.random(sum(sizes)) < trained
        np.packbits(bits, bitorder="little").tofile(folder / "loss.bin")
    (folder / "meta.json").write_text(meta.to_json())
    return TokenStore(folder)


def pack(folder: Path, store: TokenStore, chosen: np.ndarray, length: int, policy: int = 0) -> RowsMeta:
    """Rows of the chosen documents (bool), in one group, long ones treated as POLICIES[policy]."""
    documents = np.flatnonzero(chosen)
    return write_rows(folder, store, [Chosen(documents, np.full(len(documents), policy, np.uint8))], length)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def slow_best_fit(lengths: list[int], limit: int) -> list[int]:
    """Best-fit decreasing by searching all rows; of equal ones the longest unchanged."""
    free, changed, row_of = list[int](), list[int](), [0] * len(lengths)
    for time, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        rows = [row for row in range(len(free)) if free[row] >= lengths[index]]
        if rows:
            row = min(rows, key=lambda r: (free[r], changed[r]))
        else:
            row = len(free)
            free.append(limit)
            changed.append(0)
        free[row] -= lengths[index]
        changed[row] = time
        row_of[index] = row
    return row_of


def test_packing_equals_searching_all_rows(rng: np.random.Generator) -> None:
    for _ in range(60):
        limit = int(rng.integers(2, 70))
        lengths = rng.integers(1, limit + 1, int(rng.integers(1, 150))).astype(np.int32)
        row_of, rows = best_fit(lengths, limit)
        assert row_of.tolist() == slow_best_fit(lengths.tolist(), limit)
        assert rows == row_of.max() + 1
        assert np.bincount(row_of, lengths).max() <= limit


def test_rows_hold_every_piece_of_every_document_once(tmp_path: Path, rng: np.random.Generator) -> None:
    sizes = [*rng.integers(1, 90, 200).tolist(), 1, 2, 32, 33, 64, 65, 320]
    store = made_store(tmp_path / "s", sizes, rng)
    chosen = rng.random(len(sizes)) < 0.8
    meta = pack(tmp_path / "r", store, chosen, 32)
    rows = Rows(tmp_path / "r")
    expected = []
    starts = np.cumsum([0, *sizes])
    for document in np.flatnonzero(chosen):
        for at in range(0, sizes[document], 32):
            length = min(32, sizes[document] - at)
            if length >= 2:
                expected.append((int(starts[document]) + at, length))
    pieces = [rows.pieces(row) for row in range(len(rows))]
    assert sorted(piece for row in pieces for piece in row) == expected
    assert all(sum(length for _, length in row) <= 32 for row in pieces)
    lengths = np.array([length for _, length in expected])
    assert (meta.pieces, meta.tokens, meta.targets) == (len(expected), lengths.sum(), (lengths - 1).sum())
    assert meta.documents_cut == sum(size > 32 for size, use in zip(sizes, chosen, strict=True) if use)
    assert meta.pieces_dropped == sum(size % 32 == 1 for size, use in zip(sizes, chosen, strict=True) if use)
    assert meta.mean_length_by_token == pytest.approx((lengths**2).sum() / lengths.sum())
    assert meta.fill == lengths.sum() / (32 * len(rows))


def test_micro_batch_predicts_the_next_token_within_each_piece(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    store = made_store(tmp_path / "s", rng.integers(2, 60, 80).tolist(), rng)
    pack(tmp_path / "r", store, np.ones(80, bool), 40)
    batches = Batches(store, Rows(tmp_path / "r"), seed=5)
    row_ids = batches.row_ids(0, 7)
    batch = batches.micro_batch(row_ids)
    assert batch.rows == row_ids and sum(batch.lengths) == batch.tokens
    assert (batch.ids.dtype, batch.targets.dtype, batch.positions.dtype) == (np.int64, np.int64, np.int32)
    everything = store.read(0, store.meta.tokens)
    at = 0
    for row in row_ids:
        for start, length in batches.rows.pieces(row):
            ids = everything[start : start + length]
            assert batch.ids[at : at + length].tolist() == ids.tolist()
            assert batch.targets[at : at + length].tolist() == [*ids[1:].tolist(), IGNORED]
            assert batch.positions[at : at + length].tolist() == list(range(length))
            at += length
    assert at == batch.tokens == batches.tokens(row_ids)
    assert batches.targets(row_ids) == int((batch.targets != IGNORED).sum())


def test_order_of_rows_does_not_depend_on_how_steps_are_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    store = made_store(tmp_path / "s", [20] * 23, rng)
    pack(tmp_path / "r", store, np.ones(23, bool), 20)
    batches = Batches(store, Rows(tmp_path / "r"), seed=9)
    stream = [row for step in range(70) for row in batches.row_ids(step, 1)]
    for rows_per_step in (2, 5, 7, 60):
        steps = 70 // rows_per_step
        again = [row for step in range(steps) for row in batches.row_ids(step, rows_per_step)]
        assert again == stream[: len(again)]
    epochs = [stream[start : start + 23] for start in (0, 23, 46)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Batches(store, batches.rows, seed=10).row_ids(0, 23) != tuple(epochs[0])


def test_micro_batches_of_a_step_make_up_its_batch(tmp_path: Path, rng: np.random.Generator) -> None:
    store = made_store(tmp_path / "s", rng.integers(2, 30, 50).tolist(), rng)
    pack(tmp_path / "r", store, np.ones(50, bool), 30)
    batches = Batches(store, Rows(tmp_path / "r"), seed=1)
    row_ids = batches.row_ids(3, 6)
    whole = batches.micro_batch(row_ids)
    parts = [
        batches.micro_batch(row_ids[:1]),
        batches.micro_batch(row_ids[1:4]),
        batches.micro_batch(row_ids[4:]),
    ]
    for name in ("ids", "targets", "positions"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize(
    ("val_size", "expected"), [(0, 0), (0.1, 10), (0.001, 1), (1, 1), (37, 37), (0.99, 99)]
)
def test_validation_takes_the_asked_share(val_size: float, expected: int, seed: int) -> None:
    chosen = validation_documents(100, val_size, seed)
    assert chosen.sum() == expected
    assert np.array_equal(chosen, validation_documents(100, val_size, seed))


@pytest.mark.parametrize("val_size", [-0.1, 100, 1.5])
def test_unusable_validation_share_is_refused(val_size: float) -> None:
    with pytest.raises(ConfigError, match="val_size"):
        validation_documents(100, val_size, 0)


def test_validation_of_another_seed_differs() -> None:
    assert not np.array_equal(validation_documents(100, 20, 1), validation_documents(100, 20, 2))


def test_documents_without_targets_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    store = made_store(tmp_path / "s", [1, 1], rng)
    with pytest.raises(DataError, match="two tokens"):
        pack(tmp_path / "r", store, np.ones(2, bool), 8)
    assert not (tmp_path / "r").exists()


def test_truncated_rows_are_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    store = made_store(tmp_path / "s", [5, 6], rng)
    pack(tmp_path / "r", store, np.ones(2, bool), 8)
    (tmp_path / "r" / "lengths.bin").write_bytes(b"1234")
    with pytest.raises(DamagedFile, match=r"lengths\.bin"):
        Rows(tmp_path / "r")


# Loss masks, long documents, mixes


@pytest.mark.parametrize("name", ("rows.bin", "pieces.bin", "lengths.bin"))
def test_numbers_that_cannot_be_are_damage(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    store = made_store(tmp_path / "s", [9, 30, 5, 14], rng)
    pack(tmp_path / "r", store, np.ones(4, bool), 12)
    path = tmp_path / "r" / name
    dtype = np.dtype("<i4" if name == "lengths.bin" else "<i8")
    whole = np.fromfile(path, dtype)
    for value in (-1, -(2**31), 2**31 - 1, *([] if dtype.itemsize == 4 else [2**62, -(2**62)])):
        damaged = whole.copy()
        damaged[rng.integers(len(whole))] = value
        damaged.tofile(path)
        rows = Rows(tmp_path / "r")
        with pytest.raises(DamagedFile):
            for row in range(len(rows)):
                for start, length in rows.pieces(row):
                    store.read(start, length)
        rows.close()


def test_masked_targets_are_left_out_of_batches_and_counts(tmp_path: Path, rng: np.random.Generator) -> None:
    sizes = rng.integers(2, 90, 150).tolist()
    store = made_store(tmp_path / "s", sizes, rng, trained=0.1)
    meta = pack(tmp_path / "r", store, np.ones(150, bool), 40)
    batches = Batches(store, Rows(tmp_path / "r"), seed=5)
    everything, trained = store.read(0, store.meta.tokens), store.trained(0, store.meta.tokens)
    assert trained is not None
    total, pieces = 0, set()
    for row in range(meta.rows):
        batch = batches.micro_batch((row,))
        at = 0
        for start, length in batches.rows.pieces(row):
            pieces.add((start, length))
            for offset in range(length):
                follows = start + offset + 1
                expected = everything[follows] if offset + 1 < length and trained[follows] else IGNORED
                assert batch.targets[at + offset] == expected
            at += length
        assert batches.targets((row,)) == int((batch.targets != IGNORED).sum())
        total += batches.targets((row,))
    assert total == meta.targets
    # what has no target is in no row, and nothing else is missing
    starts, missing = np.cumsum([0, *sizes]), 0
    for document, size in enumerate(sizes):
        for at in range(0, size, 40):
            start, length = int(starts[document]) + at, min(40, size - at)
            has_target = trained[start + 1 : start + length].any()
            assert ((start, length) in pieces) == bool(has_target)
            missing += length >= 2 and not has_target
    assert meta.pieces_masked == missing > 0


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_long_documents_are_split_truncated_or_dropped(
    policy: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    sizes = [*rng.integers(2, 100, 100).tolist(), 32, 33, 64, 65]
    store = made_store(tmp_path / "s", sizes, rng)
    meta = pack(
        tmp_path / "r", store, np.ones(len(sizes), bool), 32, ["split", "truncate", "drop"].index(policy)
    )
    rows = Rows(tmp_path / "r")
    found = sorted(piece for row in range(len(rows)) for piece in rows.pieces(row))
    expected, starts = [], np.cumsum([0, *sizes])
    for start, size in zip(starts.tolist(), sizes, strict=False):
        if size <= 32 or policy == "truncate":
            expected.append((start, min(size, 32)))
        elif policy == "split":
            cut = [(start + at, min(32, size - at)) for at in range(0, size, 32)]
            expected += [piece for piece in cut if piece[1] >= 2]
    assert found == expected
    long = [size for size in sizes if size > 32]
    assert meta.documents_cut == (0 if policy == "drop" else len(long))
    assert meta.documents_left_out == (len(long) if policy == "drop" else 0)
    lost = {"split": 0, "truncate": sum(size - 32 for size in long), "drop": sum(long)}
    assert meta.tokens_left_out == lost[policy]


def test_only_long_documents_and_all_dropped_says_so(tmp_path: Path, rng: np.random.Generator) -> None:
    store = made_store(tmp_path / "s", [50, 60], rng)
    with pytest.raises(DataError, match="all 2 documents are longer than a row of 32"):
        pack(tmp_path / "r", store, np.ones(2, bool), 32, 2)


def mixed(tmp_path: Path, rng: np.random.Generator, weights: list[int], rows: list[int]) -> Batches:
    """Batches over sources whose documents fill a row each."""
    store = made_store(tmp_path / "s", [8] * sum(rows), rng)
    first = np.cumsum([0, *rows])
    groups = [
        Chosen(np.arange(first[i], first[i + 1]), np.zeros(rows[i], np.uint8), weight)
        for i, weight in enumerate(weights)
    ]
    write_rows(tmp_path / "r", store, groups, 8)
    return Batches(store, Rows(tmp_path / "r"), seed=int(rng.integers(1 << 30)))


def test_a_mix_has_exact_shares_and_sees_every_row_of_a_source_once_an_epoch(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights, rows = [5, 2, 1], [23, 40, 3]
    batches = mixed(tmp_path, rng, weights, rows)
    assert [group.rows for group in batches.rows.meta.groups] == rows
    stream = [row for step in range(400) for row in batches.row_ids(step, 4)]
    source = np.searchsorted(np.cumsum(rows), stream, "right")
    for s, weight in enumerate(weights):
        counts = np.cumsum(source == s)
        n = np.arange(1, len(stream) + 1)
        assert np.abs(counts * 8 - n * weight).max() < 8
        assert (counts[7::8] * 8 == n[7::8] * weight).all()
        own = [row for row, of in zip(stream, source, strict=True) if of == s]
        first, size = sum(rows[:s]), rows[s]
        epochs = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert len(epochs) > 1
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs)
        assert size < 5 or epochs[0] != epochs[1]


def test_a_mix_does_not_depend_on_how_steps_are_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    batches = mixed(tmp_path, rng, [3, 2], [11, 17])
    stream = [row for step in range(140) for row in batches.row_ids(step, 1)]
    for rows_per_step in (2, 5, 7, 70):
        again = [row for step in range(140 // rows_per_step) for row in batches.row_ids(step, rows_per_step)]
        assert again == stream[: len(again)]
    assert batches.row_ids_at(10**12, 3) == tuple(batches.row_ids_at(10**12 + i, 1)[0] for i in range(3))


# Resuming costs nothing


def test_a_step_far_into_five_million_rows_reads_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five million rows of one short document each, opened and entered in a late epoch; work is counted."""
    count = 5_000_000
    folder = tmp_path / "s"
    folder.mkdir()
    with open(folder / "tokens.bin", "wb") as file:
        file.truncate(4 * count * 2)  # holes read as zeros
    np.arange(0, 4 * count + 1, 4, dtype="<i8").tofile(folder / "documents.bin")
    meta = StoreMeta(
        key="k", dtype="<u2", vocab=60_000, tokenizer_sha256="t", add_bos=False, bos=None, eos=0,
        sources=(), documents=count, tokens=4 * count,
    )  # fmt: skip
    (folder / "meta.json").write_text(meta.to_json())
    rows = tmp_path / "r"
    rows.mkdir()
    np.arange(0, 4 * count, 4, dtype="<i8").tofile(rows / "pieces.bin")
    np.full(count, 4, "<i4").tofile(rows / "lengths.bin")
    np.arange(count + 1, dtype="<i8").tofile(rows / "rows.bin")
    made = RowsMeta(
        max_seq_length=4, documents=count, documents_cut=0, pieces=count, pieces_dropped=0, rows=count,
        tokens=4 * count, targets=3 * count, longest=4, mean_length_by_token=4.0,
    )  # fmt: skip
    (rows / "meta.json").write_text(made.to_json())
    read = 0
    original = Reader.read_into

    def counted(self: Reader, out: np.ndarray, offset: int) -> None:
        nonlocal read
        read += out.nbytes
        original(self, out, offset)

    monkeypatch.setattr(Reader, "read_into", counted)
    steps = 0
    for step in (0, 10**5, 623_456, 10**9):
        batches = Batches(TokenStore(folder), Rows(rows), seed=3)
        ids = batches.row_ids(step, 8)
        batch = batches.micro_batch(ids)
        assert batch.tokens == 32 and len(set(ids)) == 8
        steps += 1
    # per row: where it begins (twice), its piece's start and length, its ids
    assert read <= steps * 8 * (16 * 2 + 8 + 4 + 8)
