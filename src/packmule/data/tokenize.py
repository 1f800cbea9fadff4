"""Files -> a token store: reading here, encoding and writing in one thread beside it, all bounded."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from packmule.data.documents import Document, Numbered, Reading, Tally, documents, format_of
from packmule.data.encode import Encoded, encode, example
from packmule.data.files import atomic_folder, disk_errors, write_json
from packmule.data.formats import Format
from packmule.data.sources import Source
from packmule.data.store import FORMAT, EntryReport, FormatReport, Run, Segment, SourceMeta, StoreMeta
from packmule.data.text import Piece
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

_BATCH_CHARACTERS = 1 << 18
_BATCHES_WAITING = 2
_OFFSETS_HELD = 1 << 14

Groups = Sequence[Sequence[Source]]
"""The files of each entry of `data.path`."""


def store_key(
    tokenizer: TextTokenizer, groups: Groups, reading: Reading | None = None, duplicates: float | None = None
) -> str:
    """sha256 of everything that decides the store's bytes: contents, not names.

    Args:
        duplicates: the similarity from which on documents are left out, or None.
    """
    reading = reading or Reading()
    parts = [
        FORMAT, tokenizer.digest, reading.format, sorted(reading.columns.items()), reading.train_on_all,
        reading.template.digest if reading.template else None, duplicates,
        [[(s.kind.container, s.kind.compression, s.sha256) for s in group] for group in groups],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_store(
    folder: Path,
    tokenizer: TextTokenizer,
    groups: Groups,
    progress: Callable[[int], None],
    reading: Reading | None = None,
    duplicates: float | None = None,
    dropped: Collection[int] = frozenset(),
) -> StoreMeta:
    """Tokenize the files into `folder`, which appears complete or not at all.

    Memory does not grow with the input: a few batches of about 256 Ki characters are in flight at a time,
    besides the longest record. Empty documents, and those in which nothing carries loss, are left out.

    Args:
        progress: called with the bytes of all files read so far.
        reading: how; plain text without a chat template by default.
        duplicates: as for `store_key`.
        dropped: numbers of documents to leave out, counted over all files in order.

    Raises:
        DataError: no text at all, nothing that carries loss, or a file that cannot be used.
        DiskError: the disk is full or read-only.
    """
    reading = reading or Reading()
    with atomic_folder(folder) as temporary, disk_errors(folder):
        with (
            open(temporary / "tokens.bin", "wb") as tokens,
            open(temporary / "documents.bin", "wb") as starts,
            open(temporary / "loss.bin", "wb") as loss,
        ):
            writer = _Writer(tokenizer, len(groups), tokens, starts, loss)
            tallies = _run(writer, groups, reading, dropped, progress)
            writer.finish()
        if not writer.masked:
            (temporary / "loss.bin").unlink()
        _check(writer, tallies, groups)
        meta = StoreMeta(
            key=store_key(tokenizer, groups, reading, duplicates),
            dtype=writer.dtype.str,
            vocab=tokenizer.vocab,
            tokenizer_sha256=tokenizer.digest,
            add_bos=tokenizer.add_bos,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            sources=tuple(
                SourceMeta(path=str(s.path), bytes=s.bytes, sha256=s.sha256) for g in groups for s in g
            ),
            documents=writer.documents,
            tokens=writer.tokens,
            masked=writer.masked,
            entries=tuple(entry.report(tally) for entry, tally in zip(writer.entries, tallies, strict=True)),
            runs=writer.runs,
        )
        write_json(temporary / "meta.json", meta.model_dump(mode="json"))
    return meta


def _run(
    writer: _Writer,
    groups: Groups,
    reading: Reading,
    dropped: Collection[int],
    progress: Callable[[int], None],
) -> list[Tally]:
    """Read in this thread, encode and write in another; at most a few batches are between them."""
    tallies = [Tally() for _ in groups]
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "tokenize") as pool:
        try:
            for batch, done in _batches(groups, reading, tallies, dropped):
                waiting.append(pool.submit(writer.add, batch))
                while len(waiting) > _BATCHES_WAITING:
                    waiting.popleft().result()
                progress(done)
            while waiting:
                waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return tallies


def _check(writer: _Writer, tallies: Sequence[Tally], groups: Groups) -> None:
    if writer.documents:
        return
    names = ", ".join(str(source.path) for group in groups for source in group[:3])
    unanswered = sum(entry.unanswered for entry in writer.entries)
    if unanswered and {name for tally in tallies for name in tally.formats} == {"tokens"}:
        raise DataError(
            f"nothing in the dataset carries loss: all labels of {unanswered} documents are -100 ({names}).",
            "give tokens that are to be learned their own id in `labels`, or leave `labels` out",
        )
    if unanswered:
        raise DataError(
            f"nothing in the dataset carries loss: {unanswered} documents hold no answer ({names}).",
            "add answers (assistant messages, completions), or learn everything: data.train_on: all",
        )
    raise DataError(f"the dataset holds no text ({names}).", "check that the files are not empty")


class _Tagged(NamedTuple):
    """A document, the entry it came from, and its file's name and format."""

    document: Document
    entry: int
    format: Format
    source: Source


def _batches(
    groups: Groups, reading: Reading, tallies: Sequence[Tally], dropped: Collection[int]
) -> Iterator[tuple[list[_Tagged], int]]:
    """Documents of about 256 Ki characters in all, and the bytes of all files read so far."""
    before, number, batch, size = 0, -1, list[_Tagged](), 0
    for entry, group in enumerate(groups):
        for source in group:
            format, columns = format_of(source, reading)
            tallies[entry].found(format.name, str(source.path), columns)
            for document in documents(source, reading, tallies[entry]):
                number += not isinstance(document, Piece) or document.first
                if number in dropped:
                    tallies[entry].duplicates += not isinstance(document, Piece) or document.first
                    continue
                batch.append(_Tagged(document, entry, format, source))
                size += _size(document) + 64
                if size >= _BATCH_CHARACTERS:
                    yield batch, before + document.end
                    batch, size = [], 0
            before += source.bytes
    yield batch, before


def _size(document: Document) -> int:
    return len(document.tokens.ids) if isinstance(document, Numbered) else len(document.text)


@dataclass
class _Format:
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    example: tuple[Segment, ...] = ()


@dataclass
class _Entry:
    unanswered: int = 0
    formats: dict[str, _Format] = field(default_factory=dict)

    def report(self, tally: Tally) -> EntryReport:
        reports = []
        for name, files in tally.formats.items():
            found = self.formats.get(name, _Format())
            reports.append(
                FormatReport(
                    format=name, files=files.count, file=files.first, columns=files.columns,
                    documents=found.documents, tokens=found.tokens, trained=found.trained,
                    example=found.example,
                )
            )  # fmt: skip
        return EntryReport(
            documents=sum(report.documents for report in reports),
            tokens=sum(report.tokens for report in reports),
            trained=sum(report.trained for report in reports),
            empty=tally.empty,
            unanswered=self.unanswered,
            duplicates=tally.duplicates,
            tools=tally.tools,
            formats=tuple(reports),
        )


class _Writer:
    """Encodes batches and appends them to the files of a store."""

    def __init__(
        self, tokenizer: TextTokenizer, entries: int, tokens: BinaryIO, starts: BinaryIO, loss: BinaryIO
    ) -> None:
        self.dtype = np.dtype("<u2" if tokenizer.vocab < 1 << 16 else "<u4")
        self.entries = [_Entry() for _ in range(entries)]
        self._runs: list[list[int]] = []  # entry, masked, documents
        self._run: tuple[int, bool] | None = None
        self.tokens = self.documents = 0
        self.masked = False
        self._tokenizer = tokenizer
        self._tokens_file, self._starts_file, self._loss_file = tokens, starts, loss
        self._starts = [0]
        self._bits = np.empty(0, bool)  # of the last byte that is not full yet

    def add(self, batch: Sequence[_Tagged]) -> None:
        """Encode and append one batch."""
        flat: list[int] = []
        masks: list[tuple[int, np.ndarray]] = []
        for tagged, encoded in zip(
            batch, encode([tagged.document for tagged in batch], self._tokenizer), strict=True
        ):
            if encoded.trained is not None and not encoded.trained[1:].any():
                self.entries[tagged.entry].unanswered += 1
                continue
            if encoded.trained is not None:
                masks.append((len(flat), encoded.trained))
            flat += encoded.ids
            self._count(tagged, encoded, self.tokens + len(flat))
        if len(self._starts) >= _OFFSETS_HELD:
            self._write_starts()
        self._write_loss(len(flat), masks)
        self.tokens += len(flat)
        self._tokens_file.write(np.array(flat, self.dtype).tobytes())

    def _count(self, tagged: _Tagged, encoded: Encoded, end: int) -> None:
        found = self.entries[tagged.entry].formats.setdefault(tagged.format.name, _Format())
        if not found.tokens:
            found.example = example(encoded, self._tokenizer)
        found.tokens += len(encoded.ids)
        found.trained += len(encoded.ids) if encoded.trained is None else int(encoded.trained.sum())
        if not encoded.last:
            return
        found.documents += 1
        self.documents += 1
        self._starts.append(end)
        run = (tagged.entry, encoded.trained is not None)
        if run != self._run:
            self._runs.append([tagged.entry, encoded.trained is not None, 0])
            self._run = run
        self._runs[-1][2] += 1

    @property
    def runs(self) -> tuple[Run, ...]:
        """What follows what in the store."""
        return tuple(Run(entry=e, masked=bool(masked), documents=n) for e, masked, n in self._runs)

    def _write_loss(self, count: int, masks: Sequence[tuple[int, np.ndarray]]) -> None:
        """Append the bits of `count` tokens; nothing until the first mask comes."""
        if not self.masked:
            if not masks:
                return
            self.masked = True
            for begin in range(0, self.tokens // 8, 1 << 20):
                self._loss_file.write(b"\xff" * min(1 << 20, self.tokens // 8 - begin))
            self._bits = np.ones(self.tokens % 8, bool)
        bits = np.ones(len(self._bits) + count, bool)
        bits[: len(self._bits)] = self._bits
        for at, trained in masks:
            bits[len(self._bits) + at :][: len(trained)] = trained
        full = len(bits) // 8 * 8
        self._loss_file.write(np.packbits(bits[:full], bitorder="little").tobytes())
        self._bits = bits[full:]

    def _write_starts(self) -> None:
        self._starts_file.write(np.array(self._starts, "<i8").tobytes())
        self._starts.clear()

    def finish(self) -> None:
        """Write what is held back."""
        self._write_starts()
        self._loss_file.write(np.packbits(self._bits, bitorder="little").tobytes())
