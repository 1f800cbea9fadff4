"""The token store: the ids of all documents in one flat file, made once per content.

    tokens.bin      ids, uint16 (vocabulary below 65536) or uint32, little endian
    documents.bin   int64, where each document begins, and the end: documents + 1 numbers
    meta.json       StoreMeta

Each document ends with the end-of-text token and, where the tokenizer says so, begins with bos.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packmule.data.files import Reader, atomic_folder, disk_errors, read_text, write_json
from packmule.data.sources import Piece, Source, read_pieces
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DamagedFile, DataError
from packmule.spec.records import Record

FORMAT = 1
_BATCH_CHARACTERS = 1 << 18
_OFFSETS_HELD = 1 << 14


class SourceMeta(Record):
    """A file the store was made from."""

    path: str
    bytes: int
    sha256: str


class StoreMeta(Record):
    """What a store holds and what it was made from."""

    format: int = FORMAT
    key: str
    dtype: str
    vocab: int
    tokenizer_sha256: str
    add_bos: bool
    bos: int | None
    eos: int
    sources: tuple[SourceMeta, ...]
    documents: int
    tokens: int


def store_key(tokenizer: TextTokenizer, sources: Sequence[Source]) -> str:
    """sha256 of everything that decides the store's bytes: contents, not names."""
    parts = [FORMAT, tokenizer.digest, [(s.path.suffix.lower(), s.sha256) for s in sources]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
        if self.meta.format != FORMAT or self.meta.dtype not in ("<u2", "<u4"):
            raise DataError(
                f"{path}: format {self.meta.format} is not supported.", "delete the folder; it is made again"
            )
        self._dtype = np.dtype(self.meta.dtype)
        self._tokens = Reader(folder / "tokens.bin")
        self._documents = Reader(folder / "documents.bin")
        expected = (self.meta.tokens * self._dtype.itemsize, (self.meta.documents + 1) * 8)
        for reader, length in zip((self._tokens, self._documents), expected, strict=True):
            if reader.bytes != length:
                raise DamagedFile(
                    f"{reader.path} has {reader.bytes} bytes instead of {length}.",
                    "delete its folder; it is made again",
                )

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` (int64 [n]) with the ids from token `start` on."""
        raw = np.empty(len(out), self._dtype)
        self._tokens.read_into(raw, start * self._dtype.itemsize)
        out[:] = raw

    def read(self, start: int, length: int) -> np.ndarray:
        """int64 [length], the ids from token `start` on."""
        out = np.empty(length, np.int64)
        self.read_into(out, start)
        return out

    def document_bounds(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """int64 [count + 1]: where documents first..first+count begin, and where the last ends."""
        count = self.meta.documents - first if count is None else count
        out = np.empty(count + 1, "<i8")
        self._documents.read_into(out, first * 8)
        return out

    def document(self, index: int) -> np.ndarray:
        """int64 [n], the ids of one document."""
        start, end = self.document_bounds(index, 1).tolist()
        return self.read(start, end - start)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._documents.close()


def write_store(
    folder: Path, tokenizer: TextTokenizer, sources: Sequence[Source], progress: Callable[[int], None]
) -> StoreMeta:
    """Tokenize the sources into `folder`, which appears complete or not at all.

    Memory does not grow with the input: about 256 Ki characters are in flight at a time, besides
    the longest line of a .jsonl file. Empty documents are left out.

    Args:
        progress: called with the bytes of all sources read so far.

    Raises:
        DataError: no text at all, or a source that cannot be used.
        DiskError: the disk is full or read-only.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab < 1 << 16 else "<u4")
    with atomic_folder(folder) as temporary, disk_errors(folder):
        with (
            open(temporary / "tokens.bin", "wb") as tokens,
            open(temporary / "documents.bin", "wb") as documents,
        ):
            writer = _Writer(tokenizer, dtype, tokens, documents)
            for batch, done in _batches(sources):
                writer.add(batch)
                progress(done)
            writer.finish()
        if not writer.documents:
            names = ", ".join(str(source.path) for source in sources[:3])
            raise DataError(f"the dataset holds no text ({names}).", "check that the files are not empty")
        meta = StoreMeta(
            key=store_key(tokenizer, sources),
            dtype=dtype.str,
            vocab=tokenizer.vocab,
            tokenizer_sha256=tokenizer.digest,
            add_bos=tokenizer.add_bos,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            sources=tuple(SourceMeta(path=str(s.path), bytes=s.bytes, sha256=s.sha256) for s in sources),
            documents=writer.documents,
            tokens=writer.tokens,
        )
        write_json(temporary / "meta.json", meta.model_dump(mode="json"))
    return meta


def _batches(sources: Sequence[Source]) -> Iterator[tuple[list[Piece], int]]:
    """Pieces of about 256 Ki characters in all, and the bytes of all sources read so far."""
    before, batch, size = 0, list[Piece](), 0
    for source in sources:
        for piece in read_pieces(source):
            batch.append(piece)
            size += len(piece.text) + 64
            if size >= _BATCH_CHARACTERS:
                yield batch, before + piece.end
                batch, size = [], 0
        before += source.bytes
    yield batch, before


class _Writer:
    def __init__(
        self, tokenizer: TextTokenizer, dtype: np.dtype, tokens: BinaryIO, documents: BinaryIO
    ) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        self._tokens_file, self._documents_file = tokens, documents
        self.tokens = self.documents = 0
        self._starts = [0]

    def add(self, batch: Sequence[Piece]) -> None:
        encoded: list[list[int]] = [[]] * len(batch)
        for first, encode in ((True, self._tokenizer.encode), (False, self._tokenizer.encode_continued)):
            chosen = [i for i, piece in enumerate(batch) if piece.first is first]
            for i, ids in zip(chosen, encode([batch[i].text for i in chosen]), strict=True):
                encoded[i] = ids
        flat: list[int] = []
        for piece, ids in zip(batch, encoded, strict=True):
            if piece.first and self._tokenizer.add_bos and self._tokenizer.bos is not None:
                flat.append(self._tokenizer.bos)
            flat += ids
            if piece.last:
                flat.append(self._tokenizer.eos)
                self.documents += 1
                self._starts.append(self.tokens + len(flat))
        self.tokens += len(flat)
        self._tokens_file.write(np.array(flat, self._dtype).tobytes())
        if len(self._starts) >= _OFFSETS_HELD:
            self.finish()

    def finish(self) -> None:
        self._documents_file.write(np.array(self._starts, "<i8").tobytes())
        self._starts.clear()
