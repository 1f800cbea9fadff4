"""Rows, the validation split and micro-batches: every token once, whatever the order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packmule.data.batches import Batches
from packmule.data.rows import Rows, best_fit, validation_documents, write_rows
from packmule.data.store import StoreMeta, TokenStore
from packmule.errors import ConfigError, DamagedFile, DataError
from packmule.spec.batch import IGNORED


def made_store(folder: Path, sizes: list[int], rng: np.random.Generator) -> TokenStore:
    """A store of documents of the given sizes with random ids."""
    folder.mkdir()
    tokens = rng.integers(0, 60_000, sum(sizes)).astype("<u2")
    tokens.tofile(folder / "tokens.bin")
    np.cumsum([0, *sizes]).astype("<i8").tofile(folder / "documents.bin")
    meta = StoreMeta(
        key="k", dtype="<u2", vocab=60_000, tokenizer_sha256="t", add_bos=False, bos=None, eos=0,
        sources=(), documents=len(sizes), tokens=sum(sizes),
    )  # fmt: skip
    (folder / "meta.json").write_text(meta.to_json())
    return TokenStore(folder)


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
    meta = write_rows(tmp_path / "r", store, chosen, 32)
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
    write_rows(tmp_path / "r", store, np.ones(80, bool), 40)
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
    write_rows(tmp_path / "r", store, np.ones(23, bool), 20)
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
    write_rows(tmp_path / "r", store, np.ones(50, bool), 30)
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
        write_rows(tmp_path / "r", store, np.ones(2, bool), 8)
    assert not (tmp_path / "r").exists()


def test_truncated_rows_are_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    store = made_store(tmp_path / "s", [5, 6], rng)
    write_rows(tmp_path / "r", store, np.ones(2, bool), 8)
    (tmp_path / "r" / "lengths.bin").write_bytes(b"1234")
    with pytest.raises(DamagedFile, match=r"lengths\.bin"):
        Rows(tmp_path / "r")
