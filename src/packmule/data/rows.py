"""Documents -> rows of at most T tokens, packed once and stored; and the validation split.

    pieces.bin   int64 token start of each piece, row by row
    lengths.bin  int32 length of each piece, in the same order
    targets.bin  int32 how many tokens of each piece carry loss; not there where all but the first do
    rows.bin     int64 first piece of each row, and the number of pieces: rows + 1 numbers
    meta.json    RowsMeta

A document longer than T is cut into pieces of T tokens, shortened to T, or left out. A piece is from then on
a document of its own: positions begin at 0 and nothing is seen across the cut. A piece without targets is
dropped. Rows of a weighted mix lie source by source; no row holds two sources.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from packmule.data.files import Reader, atomic_folder, disk_errors, read_text, write_json
from packmule.data.order import permute
from packmule.data.store import TokenStore
from packmule.errors import ConfigError, DamagedFile, DataError
from packmule.spec.records import Record

FORMAT = 2
_READ = (1, FORMAT)
LongDocuments = Literal["split", "truncate", "drop"]
_SPLIT_EPOCH = -1
"""The validation split uses the same permutation as the epochs, at an epoch of its own."""


class RowGroup(Record):
    """The rows of one source of a mix: how many, and how often they come in a period of the mix."""

    rows: int
    weight: int


class RowsMeta(Record):
    """What a row set holds. Lengths are in tokens."""

    format: int = FORMAT
    max_seq_length: int
    documents: int
    documents_cut: int
    pieces: int = Field(ge=0)
    pieces_dropped: int
    rows: int = Field(ge=0)
    tokens: int
    targets: int
    longest: int
    mean_length_by_token: float
    masked: bool = Field(default=False, description="there is a targets.bin")
    key: str = Field(default="", description="of everything the rows were made from")
    pieces_masked: int = Field(default=0, description="dropped: none of their tokens carries loss")
    documents_left_out: int = Field(default=0, description="longer than a row, by data.long_documents")
    tokens_left_out: int = Field(default=0, description="of documents left out or shortened")
    groups: tuple[RowGroup, ...] = Field(default=(), description="of a weighted mix, in the order of rows")

    @property
    def fill(self) -> float:
        """Tokens over what the rows could hold, 0 to 1."""
        return self.tokens / (self.rows * self.max_seq_length)


class Rows:
    """Reads rows by number in constant time; nothing is kept.

    Args:
        folder: a folder that `write_rows` made.

    Raises:
        DataError, ConfigError, DamagedFile: missing, of another version, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "meta.json"
        self.folder = folder
        self.meta = RowsMeta.parse_json(read_text(path), str(path))
        if self.meta.format not in _READ:
            raise DataError(
                f"{path}: format {self.meta.format} is not supported.", "delete the folder; it is made again"
            )
        self._starts = Reader.of_length(folder / "pieces.bin", self.meta.pieces * 8)
        self._lengths = Reader.of_length(folder / "lengths.bin", self.meta.pieces * 4)
        self._targets = (
            Reader.of_length(folder / "targets.bin", self.meta.pieces * 4) if self.meta.masked else None
        )
        self._rows = Reader.of_length(folder / "rows.bin", (self.meta.rows + 1) * 8)

    def __len__(self) -> int:
        return self.meta.rows

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(token start, length) of each piece of a row, in order.

        Raises:
            IndexError: no such row.
            DamagedFile: numbers that no row has.
        """
        first, count = self._span(row)
        starts = _read(self._starts, first, count, "<i8")
        if starts.min(initial=0) < 0:
            raise _damaged(self._starts, row)
        return list(zip(starts.tolist(), self.lengths(row).tolist(), strict=True))

    def lengths(self, row: int) -> np.ndarray:
        """int32, the length of each piece of a row; raises as `pieces`."""
        lengths = _read(self._lengths, *self._span(row), "<i4")
        if lengths.min(initial=1) < 1 or lengths.sum(dtype=np.int64) > self.meta.max_seq_length:
            raise _damaged(self._lengths, row)
        return lengths

    def targets(self, row: int) -> int:
        """How many tokens of a row carry loss."""
        if self._targets is not None:
            return int(_read(self._targets, *self._span(row), "<i4").sum())
        lengths = self.lengths(row)
        return int(lengths.sum()) - len(lengths)

    def _span(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        first, end = _read(self._rows, row, 2, "<i8").tolist()
        if not 0 <= first <= end <= self.meta.pieces:
            raise _damaged(self._rows, row)
        return first, end - first

    def close(self) -> None:
        """Close the files."""
        for reader in (self._starts, self._lengths, self._targets, self._rows):
            if reader is not None:
                reader.close()


def _damaged(reader: Reader, row: int) -> DamagedFile:
    return DamagedFile(
        f"{reader.path}: what it says of row {row} cannot be.", "delete its folder; it is made again"
    )


def _read(reader: Reader, first: int, count: int, dtype: str) -> np.ndarray:
    out = np.empty(count, dtype)
    reader.read_into(out, first * out.itemsize)
    return out


def validation_documents(documents: int, val_size: float, seed: int) -> np.ndarray:
    """Which documents are kept for validation: bool [documents].

    Args:
        val_size: a fraction of the documents below 1 (at least one is taken unless it is 0), or a
            whole number of documents from 1 on.

    Raises:
        ConfigError: negative, not a whole number above 1, or nothing left to train on.
    """
    if val_size < 0 or (val_size >= 1 and val_size != int(val_size)):
        raise ConfigError(f"val_size = {val_size}: neither a fraction nor a count.", "use 0.05, or 100")
    count = int(val_size) if val_size >= 1 else max(1, round(val_size * documents)) if val_size > 0 else 0
    if count >= documents:
        raise ConfigError(
            f"val_size = {val_size} takes {count} of {documents} documents and leaves none to train on.",
            "lower val_size, or set it to 0",
        )
    chosen = np.zeros(documents, bool)
    if count:
        chosen[permute(np.arange(count), documents, seed, _SPLIT_EPOCH)] = True
    return chosen


class Chosen(NamedTuple):
    """The documents of one group of rows.

    Attributes:
        documents: their numbers, int64, ascending.
        policies: for each, what is done where it is longer than a row: index into `POLICIES`, uint8.
        weight: of the group in a mix; 0 where there is none.
    """

    documents: np.ndarray
    policies: np.ndarray
    weight: int = 0


POLICIES: tuple[LongDocuments, ...] = ("split", "truncate", "drop")


def write_rows(
    folder: Path,
    store: TokenStore,
    groups: Sequence[Chosen],
    max_seq_length: int,
    key: str = "",
    name: str = "the data",
) -> RowsMeta:
    """Cut and pack documents into `folder`, group by group.

    Args:
        key: of everything the rows are made from, kept in their meta.json.
        name: what the documents are, for messages.

    Raises:
        DataError: a group without a document that has a target.
        DiskError: the disk is full or read-only.
    """
    packed = [_pack(store, group, max_seq_length, name) for group in groups]
    rows = np.cumsum([0, *(group.rows for group in packed)])
    pieces = [group.pieces for group in packed]
    row_of = np.concatenate([group.row_of + rows[i] for i, group in enumerate(packed)])
    starts, lengths, targets = (np.concatenate([getattr(p, name) for p in pieces]) for name in
                                ("starts", "lengths", "targets"))  # fmt: skip
    order = np.argsort(row_of, kind="stable")
    first = np.zeros(rows[-1] + 1, "<i8")
    np.cumsum(np.bincount(row_of, minlength=int(rows[-1])), out=first[1:])
    tokens = int(lengths.sum(dtype=np.int64))
    meta = RowsMeta(
        max_seq_length=max_seq_length,
        documents=sum(len(group.documents) for group in groups),
        documents_cut=sum(p.cut for p in pieces),
        pieces=len(lengths),
        pieces_dropped=sum(p.dropped for p in pieces),
        rows=int(rows[-1]),
        tokens=tokens,
        targets=int(targets.sum(dtype=np.int64)),
        longest=int(lengths.max()),
        mean_length_by_token=float(np.square(lengths, dtype=np.float64).sum()) / tokens,
        masked=store.meta.masked,
        key=key,
        pieces_masked=sum(p.masked for p in pieces),
        documents_left_out=sum(p.left_out for p in pieces),
        tokens_left_out=sum(p.tokens_left_out for p in pieces),
        groups=tuple(
            RowGroup(rows=found.rows, weight=group.weight)
            for found, group in zip(packed, groups, strict=True)
            if group.weight
        ),
    )
    with atomic_folder(folder) as temporary, disk_errors(folder):
        starts[order].astype("<i8").tofile(temporary / "pieces.bin")
        lengths[order].astype("<i4").tofile(temporary / "lengths.bin")
        if meta.masked:
            targets[order].astype("<i4").tofile(temporary / "targets.bin")
        first.tofile(temporary / "rows.bin")
        write_json(temporary / "meta.json", meta.model_dump(mode="json"))
    return meta


class _Pieces(NamedTuple):
    """Starts (int64), lengths and targets (int32) of pieces in document order; what happened to others."""

    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    cut: int
    dropped: int
    masked: int
    left_out: int
    tokens_left_out: int


class _Packed(NamedTuple):
    pieces: _Pieces
    row_of: np.ndarray
    rows: int


def _pack(store: TokenStore, group: Chosen, limit: int, name: str) -> _Packed:
    bounds = store.document_bounds()
    begin, end = bounds[group.documents], bounds[group.documents + 1]
    del bounds
    pieces = _pieces(store, begin, end, group.policies, limit)
    if not len(pieces.lengths):
        cause, hint = _nothing(pieces, limit)
        raise DataError(f"{name}: {cause}", hint)
    row_of, rows = best_fit(pieces.lengths, limit)
    return _Packed(pieces, row_of.astype(np.int64), rows)


def _nothing(pieces: _Pieces, limit: int) -> tuple[str, str]:
    """Why no piece is left, and what to do."""
    if pieces.left_out:
        return (
            f"all {pieces.left_out} documents are longer than a row of {limit} tokens and are left out.",
            "raise train.max_seq_length, or use data.long_documents: split",
        )
    if pieces.masked:
        return (
            f"no token that carries loss is left within rows of {limit} tokens.",
            "raise train.max_seq_length, or learn prompts too: data.train_on: all",
        )
    return "no document has two tokens or more.", "add text"


def _pieces(
    store: TokenStore, begin: np.ndarray, end: np.ndarray, policies: np.ndarray, limit: int
) -> _Pieces:
    size = end - begin
    long = size > limit
    truncated, left_out = long & (policies == 1), long & (policies == 2)
    out = int(size[left_out].sum() + (size[truncated] - limit).sum())
    end = np.where(truncated, begin + limit, np.where(left_out, begin, end))
    size = end - begin
    count = -(-size // limit)
    owner = np.repeat(np.arange(len(size), dtype=np.int64), count)
    part = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    starts = begin[owner] + part * limit
    lengths = np.minimum(end[owner] - starts, limit)
    kept = lengths >= 2
    dropped = int(len(kept) - kept.sum())
    starts, lengths = starts[kept], lengths[kept]
    targets, masked = lengths - 1, 0
    if store.meta.masked:
        targets = store.trained_before(starts + lengths) - store.trained_before(starts + 1)
        kept = targets > 0
        masked = int(len(kept) - kept.sum())
        starts, lengths, targets = starts[kept], lengths[kept], targets[kept]
    return _Pieces(
        starts, lengths.astype(np.int32), targets.astype(np.int32), int(long.sum()) - int(left_out.sum()),
        dropped, masked, int(left_out.sum()), out,
    )  # fmt: skip


def best_fit(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing bin packing (Johnson et al. 1974).

    Each piece, longest first (equal ones in their order), goes to the fullest row that has room,
    of these the one that has waited longest, else to a new row. Rows are found by free space: one
    bit per size tells whether a row has exactly that much left, so a piece costs one scan of
    `limit` bits.

    Args:
        lengths: integers [M] in 1..limit.
        limit: tokens a row holds.

    Returns:
        (row of each piece, int32 [M]; number of rows)
    """
    row_of = np.empty(len(lengths), np.int32)
    open_rows = [array("i") for _ in range(limit + 1)]
    heads = [0] * (limit + 1)
    free_sizes, rows = 0, 0
    order = np.argsort(-lengths.astype(np.int32), kind="stable")
    for begin in range(0, len(order), 1 << 16):
        part = order[begin : begin + (1 << 16)]
        placed = []
        for length in lengths[part].tolist():
            fitting = free_sizes >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                queue = open_rows[free]
                row = queue[heads[free]]
                heads[free] += 1
                if heads[free] == len(queue):
                    del queue[:]
                    heads[free] = 0
                    free_sizes &= ~(1 << free)
            else:
                free, row, rows = limit, rows, rows + 1
            left = free - length
            if left:
                open_rows[left].append(row)
                free_sizes |= 1 << left
            placed.append(row)
        row_of[part] = placed
    return row_of, rows
