"""Weights into a run's slots, and out of them: import, export. Numpy only, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from packmule.checkpoint.head import Progress
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.store import StateStore
from packmule.errors import DataError
from packmule.models.weights.rows import Tensors
from packmule.shapes.layout import ITEMSIZE, Entry
from packmule.shapes.model import Block, Parameter
from packmule.shapes.module import Shape
from packmule.shapes.vocabulary import whole_name
from packmule.tiers.disk import aligned_buffer

Report = Callable[[int, int], None]

_NUMPY = {"float32": np.float32, "float64": np.float64}


class Source(Protocol):
    """Where weights come from: packmule.models.weights.source.WeightSource, or a RunSource."""

    def check(self, shape: Any) -> None:
        """Whether every parameter is there, of a shape that the source is for; raises DataError."""

    def chunks(
        self, block: Block, parameter: Parameter, chunk_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(index of the first element, elements) of each piece of a parameter, in order."""


class RunSource:
    """The master weights of another run's commit, verified as they are read. A context manager.

    Args:
        reader: of that commit; closed at the end.
    """

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self._tensors = exporter(reader)

    def check(self, shape: Shape) -> None:
        """Whether the commit is of this architecture.

        Raises:
            DataError: a block or tensor is missing, of another shape, or not of this model.
        """
        found = {
            # A tensor that is whole may have no rows: a number alone.
            name: pieces[0].entry.shape
            if len(pieces) == 1
            else (sum(piece.rows for piece in pieces), *pieces[0].entry.shape[1:])
            for name, pieces in _pieces(self._reader.layout).items()
        }
        wanted = {(block.name, p.name): p.shape for block in shape.cut(1).blocks() for p in block.parameters}
        if found != wanted:
            raise DataError(
                f"{self._reader.folder} does not hold the weights of its own model's architecture.",
                "give a run or snapshot whose files belong together",
            )

    def chunks(
        self, block: Block, parameter: Parameter, chunk_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """As Source; the pieces are the commit's chunks."""
        first = 0
        for values in self._tensors(block, parameter):
            yield first, values
            first += len(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()


def import_weights(
    store: StateStore, shape: Shape, source: Source, progress: Progress, report: Report
) -> None:
    """Fill every block's slot 0: masters from the source, moments zero; commit step 0.

    Args:
        store: new, its files created.
        report: called with (bytes done, bytes in all); may raise to stop.
    """
    source.check(shape)
    total, done = store.layout.state_bytes, 0
    for block in shape.blocks():
        store.begin(block.index)
        pieces = store.layout.pieces(block.index)
        for index, data in enumerate(_master_chunks(store, block, source)):
            store.write(block.index, index, data)
            done += len(data)
            report(done, total)
        zeros = aligned_buffer(store.layout.chunk_bytes)
        zeros[:] = bytes(len(zeros))
        for index, chunk in enumerate(store.layout.chunks(block.index)):
            if index >= pieces:
                store.write(block.index, index, zeros)
                done += chunk.bytes
                report(done, total)
        store.end(block.index)
    store.commit(progress)


def _master_chunks(store: StateStore, block: Block, source: Source) -> Iterator[memoryview]:
    """The master plane of a block in the store's chunks; what lies between tensors is zero."""
    layout = store.layout
    tensors = layout.blocks[block.index].tensors
    dtype = _NUMPY[layout.dtype]
    item = ITEMSIZE[layout.dtype]
    room = aligned_buffer(layout.chunk_bytes)
    view = np.frombuffer(room, np.uint8)
    view[:] = 0
    low = 0  # first byte of the chunk in `room`
    for parameter, entry in zip(block.parameters, tensors.entries, strict=True):
        for first, values in source.chunks(block, parameter, layout.chunk_bytes):
            raw = np.ascontiguousarray(values, dtype).view(np.uint8)
            at, begin = entry.offset + first * item, 0
            while begin < len(raw):
                while at >= low + layout.chunk_bytes:
                    yield room
                    view[:] = 0
                    low += layout.chunk_bytes
                count = min(len(raw) - begin, low + layout.chunk_bytes - at)
                view[at - low : at - low + count] = raw[begin : begin + count]
                at, begin = at + count, begin + count
    while low < tensors.bytes:
        yield room[: min(layout.chunk_bytes, tensors.bytes - low)]
        view[:] = 0
        low += layout.chunk_bytes


def exporter(reader: StateReader, check: Callable[[], None] = lambda: None) -> Tensors:
    """The `tensors` argument of models.weights.export: masters of a commit, chunk by chunk.

    Args:
        check: called for each chunk; may raise to stop.
    """
    layout = reader.layout
    dtype, pieces = _NUMPY[layout.dtype], _pieces(layout)

    def tensors(block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        room = aligned_buffer(layout.chunk_bytes)
        first = block.first_row(parameter.name)
        for piece in pieces[block.whole.name, parameter.name]:
            offset, row = piece.entry.offset, piece.entry.bytes // piece.rows
            # What is asked for may be a part of a vocabulary, and so may what is there.
            end = first + parameter.shape[0] if block.tokens else piece.first + piece.rows
            start = offset + min(max(first - piece.first, 0), piece.rows) * row
            stop = offset + min(max(end - piece.first, 0), piece.rows) * row
            for index in range(start // layout.chunk_bytes, -(-stop // layout.chunk_bytes)):
                check()
                reader.read(piece.block, index, room)
                low = index * layout.chunk_bytes
                yield np.frombuffer(room[max(0, start - low) : min(layout.chunk_bytes, stop - low)], dtype)

    return tensors


class _Piece(NamedTuple):
    """Where some rows of a parameter lie: from row `first` on, in a tensor of a block."""

    first: int
    block: int
    entry: Entry

    @property
    def rows(self) -> int:
        return self.entry.shape[0] if self.entry.shape else 1


def _pieces(layout: StateLayout) -> dict[tuple[str, str], list[_Piece]]:
    """(whole block, parameter) -> its pieces in order; several where the vocabulary is cut."""
    found: dict[tuple[str, str], list[_Piece]] = {}
    for index, block in enumerate(layout.blocks):
        for entry in block.tensors.entries:
            pieces = found.setdefault((whole_name(block.name), entry.name), [])
            pieces.append(_Piece(sum(piece.rows for piece in pieces), index, entry))
    return found
