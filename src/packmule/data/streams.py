"""One data file as a stream of bytes, decompressed on the way; never more than a block in memory."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packmule.data.sources import Source
from packmule.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = 256 << 20
BOM = b"\xef\xbb\xbf"
_ZSTD_FEED = 2048
"""Compressed bytes handed over at once. A block of 128 KiB can take 4 of them: this bounds what comes out."""


class Stream:
    """Bytes of a file, decompressed.

    Attributes:
        path: of the file, for messages.
    """

    def __init__(self, source: Source, raw: io.FileIO) -> None:
        self.path = source.path
        self._raw = raw
        opened = {"gzip": _gzip, "zstd": _Zstd, "": lambda file: file}[source.kind.compression](raw)
        self._file = io.BufferedReader(opened, BLOCK_BYTES)

    def read(self, size: int = BLOCK_BYTES) -> bytes:
        """The next bytes; empty at the end.

        Raises:
            DataError: the compressed data is damaged or ends early.
        """
        with self._explained():
            return self._file.read(size)

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, offset, bytes with their newline) of each line; a byte order mark is dropped.

        Raises:
            DataError: a line above 256 MiB; as `read`.
        """
        offset = 0
        for number in range(1, 1 << 62):
            with self._explained():
                line = self._file.readline(MAX_LINE_BYTES)
            if not line:
                return
            if len(line) == MAX_LINE_BYTES:
                raise DataError(
                    f"{self.path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB.",
                    "write one record per line",
                )
            start, offset = offset, offset + len(line)
            if number == 1 and line.startswith(BOM):
                start, line = start + len(BOM), line.removeprefix(BOM)
            yield number, start, line

    def text(self) -> Iterator[str]:
        """The text of the file in blocks; a byte order mark is dropped.

        Raises:
            DataError: not UTF-8 (names the byte); as `read`.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset, first = 0, True
        while True:
            block = self.read()
            kept = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, offset - kept + error.start) from None
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            offset += len(block)
            if text:
                yield text
            if not block:
                return

    def position(self) -> int:
        """Bytes of the file itself that were taken so far."""
        return self._raw.tell()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error, _Damaged) as error:
            raise DataError(
                f"{self.path} is damaged or ends early: {error} (after byte {self.position()}).",
                "get the file again",
            ) from None


@contextmanager
def open_stream(source: Source) -> Iterator[Stream]:
    """The bytes of a source.

    Raises:
        DataError: it cannot be read, or changed since it was hashed.
    """
    with reading(source), open(source.path, "rb", buffering=0) as raw:
        source.check_unchanged(os.fstat(raw.fileno()))
        yield Stream(source, raw)


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """Turn an OSError inside into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {source.path}: {error.strerror or error}.", "check the path and its permissions"
        ) from None


def not_utf8(path: Path, offset: int) -> DataError:
    """The error for a byte that is no UTF-8; `offset` counts decompressed bytes."""
    return DataError(
        f"{path} is not UTF-8: byte {offset} cannot be decoded.",
        f"convert it: iconv -f latin1 -t utf-8 {path.name} > fixed{path.suffix}",
    )


class _Damaged(Exception):
    pass


def _gzip(raw: io.FileIO) -> io.RawIOBase:
    return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]


class _Zstd(io.RawIOBase):
    """Frames of zstd one after the other. The library's own reader takes a cut file for a whole one."""

    def __init__(self, raw: io.FileIO) -> None:
        import zstandard

        self._raw = raw
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._waiting = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            if not self._more():
                return 0
        size = min(len(buffer), len(self._out))
        buffer[:size] = self._out[:size]
        self._out = self._out[size:]
        return size

    def _more(self) -> bool:
        """Decompress a little more; False at the end."""
        block = self._waiting or self._raw.read(_ZSTD_FEED)
        self._waiting = b""
        if not block:
            if self._frame is not None:
                raise _Damaged("the last zstd frame is not complete")
            return False
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            self._out = memoryview(self._frame.decompress(block))
        except self._error as error:
            raise _Damaged(str(error)) from None
        if self._frame.eof:
            self._waiting, self._frame = self._frame.unused_data, None
        return True
