"""Containers of records (JSON Lines, JSON, CSV, Parquet) -> one mapping per record, streamed."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packmule.data.sources import Source
from packmule.data.streams import BLOCK_BYTES, MAX_LINE_BYTES, Stream, not_utf8, open_stream, reading
from packmule.errors import DataError

_PARQUET_ROWS = 256
_SPACE = " \t\n\r"


class Record(NamedTuple):
    """One record.

    Attributes:
        value: column -> value.
        place: where it stands in its file, for messages: "line 3", "row 7".
        end: bytes of the file read so far.
    """

    value: Mapping[str, Any]
    place: str
    end: int


def read_records(source: Source, columns: Collection[str] | None = None) -> Iterator[Record]:
    """The records of a file, in order; blank lines are passed over.

    Args:
        columns: read only these, where the container can skip the others.

    Raises:
        DataError: names the file, and the line or row that cannot be used.
    """
    container = source.kind.container
    if container == "parquet":
        yield from _parquet(source, columns)
        return
    with open_stream(source) as stream:
        if container == "lines":
            yield from _lines(stream)
        elif container == "json":
            yield from _Values(stream)
        else:
            yield from _csv(stream, "\t" if container == "tsv" else ",")


def _lines(stream: Stream) -> Iterator[Record]:
    for number, start, line in stream.lines():
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise not_utf8(stream.path, start + error.start) from None
        except (ValueError, RecursionError) as error:
            what = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(
                f"{stream.path}: line {number} is not JSON: {what}.", "write one JSON record per line"
            ) from None
        yield Record(_mapping(value, stream.path, f"line {number}"), f"line {number}", stream.position())


def _mapping(value: Any, path: Path, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {place} is not a JSON object.", 'each record must be like {"text": "..."}')
    return value


class _Values:
    """The records of a JSON file: elements of one array, or objects one after the other."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocks = stream.text()
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at, self._line = "", 0, 1
        self._ended = False

    def __iter__(self) -> Iterator[Record]:
        array = self._next() == "["
        if array:
            self._at += 1
        more = self._next() not in ("", "]")
        while more:
            line = self._line_at(self._at)
            place = f"line {line}"
            value = _mapping(self._value(), self._stream.path, place)
            yield Record(value, place, self._stream.position())
            more = self._go_on(array)
        if array:
            if self._next() != "]":
                raise self._error("the array has no end", self._at)
            self._at += 1
            if self._next():
                raise self._error("something follows the array", self._at)

    def _go_on(self, array: bool) -> bool:
        """Whether another record follows; takes the comma."""
        mark = self._next()
        if not array:
            return bool(mark)
        if mark not in (",", "]", ""):
            raise self._error("a comma is missing", self._at)
        if mark == ",":
            self._at += 1
            if self._next() in ("]", ""):
                raise self._error("a record is missing after the comma", self._at)
        return mark == ","

    def _next(self) -> str:
        """The next character that is no white space, without taking it; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._fill(1):
                return self._text[self._at : self._at + 1]

    def _fill(self, size: int) -> bool:
        """Read at least `size` more characters, as far as there are any; False at the end."""
        self._line = self._line_at(self._at)
        parts, got = [self._text[self._at :]], 0
        self._at = 0
        while got < size and not self._ended:
            block = next(self._blocks, None)
            self._ended = block is None
            parts.append(block or "")
            got += len(block or "")
        self._text = "".join(parts)
        return got > 0

    def _value(self) -> Any:
        wanted = BLOCK_BYTES
        while True:
            try:
                value, self._at = self._decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error) or not self._fill(wanted):
                    raise self._error(error.msg, error.pos) from None
            except RecursionError:
                raise self._error("too deeply nested", self._at) from None
            wanted *= 2
            if wanted > MAX_LINE_BYTES:
                raise self._error(f"a record is longer than {MAX_LINE_BYTES >> 20} MiB", self._at)

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the text may only end too early: an open string, or an error at the very end."""
        return error.msg.startswith("Unterminated") or error.pos > len(self._text) - 16

    def _line_at(self, at: int) -> int:
        return self._line + self._text.count("\n", 0, at)

    def _error(self, what: str, at: int) -> DataError:
        return DataError(
            f"{self._stream.path}: line {self._line_at(at)} is not JSON: {what}.",
            "write an array of records, or one record after the other",
        )


def _csv(stream: Stream, delimiter: str) -> Iterator[Record]:
    def decoded() -> Iterator[str]:
        for _, start, line in stream.lines():
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(stream.path, start + error.start) from None

    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(decoded(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    try:
        for row in rows:
            if not row:
                continue
            if header is None:
                header = _header(row, stream.path)
                continue
            place = f"line {rows.line_num}"
            if len(row) != len(header):
                raise DataError(
                    f"{stream.path}: {place} has {len(row)} fields, and the first line names {len(header)}.",
                    "quote fields that hold the separator, quotes or newlines",
                )
            yield Record(dict(zip(header, row, strict=True)), place, stream.position())
    except csv.Error as error:
        raise DataError(
            f"{stream.path}: line {rows.line_num} is not CSV: {error}.",
            "quote fields that hold the separator, quotes or newlines",
        ) from None


def _header(row: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in row]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: line 1 names the column {twice!r} twice.", "rename one of them")
    return names


def _parquet(source: Source, columns: Collection[str] | None) -> Iterator[Record]:
    """Row groups are streamed in batches of 256 rows."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{source.path}: reading .parquet needs pyarrow.", "install it: pip install pyarrow"
        ) from None

    arrow.set_memory_pool(arrow.system_memory_pool())  # its own keeps several MB more
    with reading(source), open(source.path, "rb") as file:
        source.check_unchanged(os.fstat(file.fileno()))
        try:
            table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            names = table.schema_arrow.names
            wanted = None if columns is None else [name for name in names if name in columns]
            total, row = max(1, table.metadata.num_rows), 0
            for batch in table.iter_batches(_PARQUET_ROWS, columns=wanted, use_threads=False):
                for value in batch.to_pylist():
                    row += 1
                    yield Record(value, f"row {row}", source.bytes * row // total)
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"{source.path} is not a Parquet file that can be read: {error}.", "get the file again"
            ) from None
