"""Documents -> rows of at most T tokens, packed once and stored; and the validation split.

    pieces.bin   int64 token start of each piece, row by row
    lengths.bin  int32 length of each piece, in the same order
    rows.bin     int64 first piece of each row, and the number of pieces: rows + 1 numbers
    meta.json    RowsMeta

A document longer than T is cut into pieces of T tokens; from then on a piece is a document of its
own: positions begin at 0 and nothing is seen across the cut. A last piece of one token has nothing
to predict and is dropped.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from packmule.data.files import Reader, atomic_folder, disk_errors, read_text, write_json
from packmule.data.order import permute
from packmule.data.store import TokenStore
from packmule.errors import ConfigError, DamagedFile, DataError
from packmule.spec.records import Record

FORMAT = 1
_SPLIT_EPOCH = -1
"""The validation split uses the same permutation as the epochs, at an epoch of its own."""


class RowsMeta(Record):
    """What a row set holds. Lengths are in tokens."""

    format: int = FORMAT
    max_seq_length: int
    documents: int
    documents_cut: int
    pieces: int
    pieces_dropped: int
    rows: int
    tokens: int
    targets: int
    longest: int
    mean_length_by_token: float

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
        if self.meta.format != FORMAT:
            raise DataError(
                f"{path}: format {self.meta.format} is not supported.", "delete the folder; it is made again"
            )
        self._starts = self._open("pieces.bin", self.meta.pieces * 8)
        self._lengths = self._open("lengths.bin", self.meta.pieces * 4)
        self._rows = self._open("rows.bin", (self.meta.rows + 1) * 8)

    def _open(self, name: str, length: int) -> Reader:
        reader = Reader(self.folder / name)
        if reader.bytes != length:
            raise DamagedFile(
                f"{reader.path} has {reader.bytes} bytes instead of {length}.",
                "delete its folder; it is made again",
            )
        return reader

    def __len__(self) -> int:
        return self.meta.rows

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(token start, length) of each piece of a row, in order.

        Raises:
            IndexError: no such row.
        """
        first, count = self._span(row)
        starts = _read(self._starts, first, count, "<i8")
        return list(zip(starts.tolist(), self.lengths(row).tolist(), strict=True))

    def lengths(self, row: int) -> np.ndarray:
        """int32, the length of each piece of a row."""
        return _read(self._lengths, *self._span(row), "<i4")

    def _span(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        first, end = _read(self._rows, row, 2, "<i8").tolist()
        return first, end - first

    def close(self) -> None:
        """Close the files."""
        for reader in (self._starts, self._lengths, self._rows):
            reader.close()


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


def write_rows(folder: Path, store: TokenStore, chosen: np.ndarray, max_seq_length: int) -> RowsMeta:
    """Cut and pack the chosen documents (bool [documents]) into `folder`.

    Raises:
        DataError: no document with two tokens or more.
        DiskError: the disk is full or read-only.
    """
    documents = np.flatnonzero(chosen)
    bounds = store.document_bounds()
    starts, lengths, cut, dropped = _pieces(bounds[documents], bounds[documents + 1], max_seq_length)
    del bounds
    if not len(lengths):
        raise DataError("no document has two tokens or more.", "add text")
    row_of, rows = best_fit(lengths, max_seq_length)
    order = np.argsort(row_of, kind="stable")
    first = np.zeros(rows + 1, "<i8")
    np.cumsum(np.bincount(row_of, minlength=rows), out=first[1:])
    square = float(np.square(lengths, dtype=np.float64).sum())
    meta = RowsMeta(
        max_seq_length=max_seq_length,
        documents=len(documents),
        documents_cut=cut,
        pieces=len(lengths),
        pieces_dropped=dropped,
        rows=rows,
        tokens=int(lengths.sum(dtype=np.int64)),
        targets=int(lengths.sum(dtype=np.int64)) - len(lengths),
        longest=int(lengths.max()),
        mean_length_by_token=square / int(lengths.sum(dtype=np.int64)),
    )
    with atomic_folder(folder) as temporary, disk_errors(folder):
        starts[order].astype("<i8").tofile(temporary / "pieces.bin")
        lengths[order].astype("<i4").tofile(temporary / "lengths.bin")
        first.tofile(temporary / "rows.bin")
        write_json(temporary / "meta.json", meta.model_dump(mode="json"))
    return meta


def _pieces(begin: np.ndarray, end: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Starts (int64) and lengths (int32) of pieces in document order; documents cut; pieces dropped."""
    size = end - begin
    count = -(-size // limit)
    owner = np.repeat(np.arange(len(size), dtype=np.int64), count)
    part = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    starts = begin[owner] + part * limit
    lengths = np.minimum(end[owner] - starts, limit).astype(np.int32)
    kept = lengths >= 2
    return starts[kept], lengths[kept], int((count > 1).sum()), int(len(kept) - kept.sum())


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
