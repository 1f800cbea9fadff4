"""Text sources -> documents, streamed: .txt and .md files (one document each), .jsonl records with
"text", folders and globs of them. Never more than a piece of a document is in memory."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from packmule.errors import DataError

TEXT_SUFFIXES = (".txt", ".md")
RECORD_SUFFIXES = (".jsonl", ".ndjson")
PIECE_CHARACTERS = 1 << 15
"""Longer documents are handed on in pieces of about this many characters."""
_MAX_LINE_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """Part of a document: `last` ends it, `first` begins it; `end` is the byte of its file that
    the reader has reached."""

    text: str
    first: bool
    last: bool
    end: int


class Source(NamedTuple):
    """One file, its size and the sha256 of its bytes."""

    path: Path
    bytes: int
    modified_ns: int
    sha256: str


def find_files(dataset: Sequence[str]) -> list[Path]:
    """The files behind paths, folders (searched to the bottom) and glob patterns.

    Folders and globs are sorted; the order of `dataset` is kept; a file named twice counts once.

    Raises:
        DataError: a path that does not exist, nothing usable found, or an unknown kind of file.
    """
    found: dict[Path, None] = {}
    for item in dataset:
        path = Path(item).expanduser()
        if path.is_file():
            candidates = [path]
        elif path.is_dir():
            candidates = sorted(p for p in path.rglob("*") if _usable(p.relative_to(path)) and p.is_file())
            if not candidates:
                raise DataError(
                    f"{path} holds no {_kinds()} file.", "name the files or folder that hold the text"
                )
        else:
            matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
            candidates = sorted(p for p in matches if p.is_file())
            if not candidates:
                raise DataError(f"dataset {item!r}: no such file, folder or pattern.", "check the path")
        for candidate in candidates:
            if candidate.suffix.lower() not in TEXT_SUFFIXES + RECORD_SUFFIXES:
                raise DataError(
                    f"{candidate}: {candidate.suffix or 'no suffix'!r} is not a known kind of data.",
                    f"supported: {_kinds()}",
                )
            found[candidate.resolve()] = None
    if not found:
        raise DataError("no dataset was given.", f"give files, folders or patterns of {_kinds()}")
    return list(found)


def hash_file(path: Path, progress: Callable[[int], None]) -> Source:
    """Read a file once for its sha256; `progress` gets the bytes of each block.

    Raises:
        DataError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            while block := file.read(1 << 20):
                digest.update(block)
                progress(len(block))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}.", "check the path and its permissions"
        ) from None
    return Source(path, status.st_size, status.st_mtime_ns, digest.hexdigest())


def read_pieces(source: Source) -> Iterator[Piece]:
    """The documents of one file, in order, in pieces.

    Raises:
        DataError: not UTF-8 (names the byte), a bad record (names the line), or a file that
            changed since it was hashed.
    """
    path = source.path
    try:
        with open(path, "rb", buffering=_BLOCK_BYTES) as file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (source.bytes, source.modified_ns):
                raise DataError(
                    f"{path} changed while it was being read.", "start again when nothing writes to it"
                )
            if path.suffix.lower() in RECORD_SUFFIXES:
                yield from _records(path, file)
            else:
                yield from _cut(_text(path, file))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}.", "check the path and its permissions"
        ) from None


def _usable(relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and relative.suffix.lower() in TEXT_SUFFIXES + RECORD_SUFFIXES


def _kinds() -> str:
    return ", ".join(TEXT_SUFFIXES + RECORD_SUFFIXES)


def _not_utf8(path: Path, offset: int) -> DataError:
    return DataError(
        f"{path} is not UTF-8: byte {offset} cannot be decoded.",
        f"convert it: iconv -f latin1 -t utf-8 {path.name} > fixed{path.suffix}",
    )


def _text(path: Path, file: BinaryIO) -> Iterator[tuple[str, int]]:
    """(text, bytes read so far) of a text file, decoded block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    while True:
        block = file.read(_BLOCK_BYTES)
        kept = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset - kept + error.start) from None
        if not offset:
            text = text.removeprefix("\ufeff")
        offset += len(block)
        if text:
            yield text, offset
        if not block:
            return


def _records(path: Path, file: BinaryIO) -> Iterator[Piece]:
    offset = 0
    for number in range(1, 1 << 62):
        line = file.readline(_MAX_LINE_BYTES)
        if not line:
            return
        if len(line) == _MAX_LINE_BYTES:
            raise DataError(
                f"{path}: line {number} is longer than {_MAX_LINE_BYTES >> 20} MiB.",
                "write one JSON record per line",
            )
        start, offset = offset, offset + len(line)
        if number == 1:
            start, line = start + 3 * line.startswith(_BOM), line.removeprefix(_BOM)
        if not line.strip():
            continue
        text = _record_text(path, number, line, start)
        yield from _cut(
            (text[i : i + PIECE_CHARACTERS], offset) for i in range(0, len(text), PIECE_CHARACTERS)
        )


def _record_text(path: Path, number: int, line: bytes, start: int) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, start + error.start) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: line {number} is not JSON: {error}.", "write one JSON record per line"
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{path}: line {number} is not a JSON object.", 'each line must be like {"text": "..."}'
        )
    if "text" not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(
            f'{path}: line {number} has no "text" key (keys: {keys}).',
            'each line must be like {"text": "..."}',
        )
    if not isinstance(record["text"], str):
        raise DataError(
            f'{path}: line {number}: "text" is not a string.', 'each line must be like {"text": "..."}'
        )
    text: str = record["text"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{path}: line {number} holds a lone surrogate escape.", "write valid Unicode"
        ) from None
    return text


def _cut(blocks: Iterator[tuple[str, int]]) -> Iterator[Piece]:
    """One document's text as pieces, cut where no tokenizer joins characters; empty ones vanish."""
    waiting, first, end = "", True, 0
    for text, end in blocks:
        waiting += text
        while len(waiting) > PIECE_CHARACTERS:
            cut = seam(waiting, PIECE_CHARACTERS)
            yield Piece(waiting[:cut], first, False, end)
            waiting, first = waiting[cut:], False
    if waiting or not first:
        yield Piece(waiting, first, True, end)


def seam(text: str, limit: int) -> int:
    """Where to cut `text` so that both sides give the tokens of the whole: after the last lone
    newline, else before the last lone space, at most `limit`; else at `limit`.

    Pre-tokenizers join runs of white space, so the white space at a seam must be one character.
    """
    for mark, after in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, 1, limit - 1)
        while at > 0 and (text[at - 1].isspace() or text[at + 1].isspace()):
            at = text.rfind(mark, 1, at)
        if at > 0:
            return at + after
    return limit
