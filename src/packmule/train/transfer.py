"""Weights into a run's slots, and out of them: import, export. Numpy only, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from packmule.checkpoint.head import Progress
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.store import StateStore
from packmule.errors import DataError
from packmule.models.weights.rows import Tensors
from packmule.shapes.layout import ITEMSIZE
from packmule.shapes.model import Block, Parameter
from packmule.shapes.module import Shape
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
        found = [
            [(entry.name, entry.shape) for entry in block.tensors.entries]
            for block in self._reader.layout.blocks
        ]
        wanted = [[(p.name, p.shape) for p in block.parameters] for block in shape.blocks()]
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
    total, done = len(store.layout.planes) * store.layout.plane_bytes, 0
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
    dtype = _NUMPY[reader.layout.dtype]

    def tensors(block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        layout = reader.layout
        entry = layout.blocks[block.index].tensors[parameter.name]
        room = aligned_buffer(layout.chunk_bytes)
        stop = entry.offset + entry.bytes
        for index in range(entry.offset // layout.chunk_bytes, -(-stop // layout.chunk_bytes)):
            check()
            reader.read(block.index, index, room)
            low = index * layout.chunk_bytes
            piece = room[max(0, entry.offset - low) : min(layout.chunk_bytes, stop - low)]
            yield np.frombuffer(piece, dtype)

    return tensors
