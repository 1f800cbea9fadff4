"""The token store: the ids of all documents in one flat file, made once per content.

tokens.bin      ids, uint16 (vocabulary below 65536) or uint32, little endian
documents.bin   int64, where each document begins, and the end: documents + 1 numbers
loss.bin        one bit per token, lowest first: it carries loss; not there where all do
meta.json       StoreMeta
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from packmule.data.files import Reader, read_text
from packmule.errors import DamagedFile, DataError
from packmule.spec.records import Record

FORMAT = 2
_READ = (1, FORMAT)
_COUNTED_TOKENS = 1 << 20


class SourceMeta(Record):
    """A file the store was made from."""

    path: str
    bytes: int
    sha256: str


class Segment(Record):
    """Part of an example: its text, and whether it carries loss."""

    text: str
    loss: bool


class FormatReport(Record):
    """The files of one entry that have one format.

    Attributes:
        file: the first of them.
        columns: of its first record.
        trained: tokens that carry loss.
        example: the beginning of its first document, decoded.
    """

    format: str
    files: int
    file: str
    columns: tuple[str, ...] = ()
    documents: int
    tokens: int
    trained: int
    example: tuple[Segment, ...] = ()


class EntryReport(Record):
    """One entry of `data.path`: what its files hold, and what was left out.

    Attributes:
        empty: records without text.
        unanswered: documents in which nothing carries loss.
        duplicates: documents that resemble an earlier one.
        tools: documents with tool definitions, which are left out, or tool calls, read as text.
    """

    documents: int
    tokens: int
    trained: int
    empty: int = 0
    unanswered: int = 0
    duplicates: int = 0
    tools: int = 0
    formats: tuple[FormatReport, ...] = ()


class Run(Record):
    """Documents that follow each other in the store, of one entry and one way of carrying loss."""

    entry: int
    masked: bool = Field(description="of a format in which some tokens carry no loss")
    documents: int


class StoreMeta(Record):
    """What a store holds and what it was made from."""

    format: int = FORMAT
    key: str
    dtype: Literal["<u2", "<u4"]
    vocab: int = Field(ge=1)
    tokenizer_sha256: str
    add_bos: bool
    bos: int | None
    eos: int
    sources: tuple[SourceMeta, ...]
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    masked: bool = Field(default=False, description="some tokens carry no loss: there is a loss.bin")
    entries: tuple[EntryReport, ...] = ()
    runs: tuple[Run, ...] = ()


class TokenStore:
    """Reads ids by range; nothing is mapped and nothing is kept.

    Args:
        folder: a folder that `write_store` made.

    Raises:
        DataError, ConfigError: missing, or of another version.
        DamagedFile: a file whose length does not match meta.json.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "meta.json"
        self.folder = folder
        self.meta = StoreMeta.parse_json(read_text(path), str(path))
        if self.meta.format not in _READ:
            raise DataError(
                f"{path}: format {self.meta.format} is not supported.", "delete the folder; it is made again"
            )
        self._dtype = np.dtype(self.meta.dtype)
        tokens = self.meta.tokens
        self._tokens = Reader.of_length(folder / "tokens.bin", tokens * self._dtype.itemsize)
        self._documents = Reader.of_length(folder / "documents.bin", (self.meta.documents + 1) * 8)
        self._loss = Reader.of_length(folder / "loss.bin", -(-tokens // 8)) if self.meta.masked else None

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` (int64 [n]) with the ids from token `start` on."""
        raw = np.empty(len(out), self._dtype)
        self._tokens.read_into(raw, start * self._dtype.itemsize)
        if len(raw) and int(raw.max()) >= self.meta.vocab:
            raise self._damaged(self._tokens, f"holds the id {int(raw.max())} of {self.meta.vocab}")
        out[:] = raw

    def read(self, start: int, length: int) -> np.ndarray:
        """int64 [length], the ids from token `start` on."""
        if not 0 <= length <= self.meta.tokens:
            raise self._damaged(self._tokens, f"has no {length} tokens from {start} on")
        out = np.empty(length, np.int64)
        self.read_into(out, start)
        return out

    def trained(self, start: int, length: int) -> np.ndarray | None:
        """bool [length], which tokens from `start` on carry loss as targets; None where all tokens do."""
        return None if self._loss is None else self._bits(self._loss, start, length)

    @staticmethod
    def _bits(reader: Reader, start: int, length: int) -> np.ndarray:
        first, last = start // 8, -(-(start + length) // 8)
        packed = np.empty(last - first, np.uint8)
        reader.read_into(packed, first)
        bits = np.unpackbits(packed, bitorder="little")
        return bits[start - first * 8 :][:length].astype(bool)

    def trained_before(self, at: np.ndarray) -> np.ndarray:
        """How many tokens before each position carry loss.

        Args:
            at: int64 [n], not decreasing, each at most the number of tokens.

        Returns:
            int64 [n].
        """
        if self._loss is None:
            return at.astype(np.int64)
        found, before, done = np.empty(len(at), np.int64), 0, 0
        for start in range(0, self.meta.tokens, _COUNTED_TOKENS):
            length = min(_COUNTED_TOKENS, self.meta.tokens - start)
            bits = self._bits(self._loss, start, length)
            sums = np.concatenate([[0], np.cumsum(bits, dtype=np.int64)])
            upto = int(np.searchsorted(at, start + length, "right"))
            found[done:upto] = before + sums[at[done:upto] - start]
            done, before = upto, before + int(sums[-1])
        return found

    def document_bounds(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """int64 [count + 1]: where documents first..first+count begin, and where the last ends."""
        count = self.meta.documents - first if count is None else count
        out = np.empty(count + 1, "<i8")
        self._documents.read_into(out, first * 8)
        if out[0] < 0 or out[-1] > self.meta.tokens or (np.diff(out) < 0).any():
            raise self._damaged(self._documents, "does not fit tokens.bin")
        return out

    def _damaged(self, reader: Reader, what: str) -> DamagedFile:
        return DamagedFile(f"{reader.path} {what}.", "delete its folder; it is made again")

    def document(self, index: int) -> np.ndarray:
        """int64 [n], the ids of one document."""
        start, end = self.document_bounds(index, 1).tolist()
        return self.read(start, end - start)

    def close(self) -> None:
        """Close the files."""
        for reader in (self._tokens, self._documents, self._loss):
            if reader is not None:
                reader.close()
