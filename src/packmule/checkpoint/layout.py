"""Where every byte of `state.bin` lies: blocks, slots, planes, tensors, chunks. Pure.

state.bin   block 0: slot 0, slot 1; block 1: slot 0, slot 1; ...
slot        the block's planes, one after the other
plane       the block's tensors, each on a 4096-byte boundary; or factors, each on a 64-byte boundary
chunk       at most `chunk_bytes` of one plane; what is read, written and checksummed at once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, PositiveInt

from packmule.errors import ConfigError
from packmule.shapes.layout import PAGE, Layout, TensorSpec, layout
from packmule.shapes.model import Block
from packmule.shapes.state import plane_layout
from packmule.spec.records import Record

StateDtype = Literal["float32", "float64", "bfloat16"]


class TensorRecord(Record):
    """One tensor of a plane; `offset` is its first byte within the plane."""

    name: str
    shape: tuple[PositiveInt, ...]
    offset: int


class BlockRecord(Record):
    """One block; `offset` is the first byte of its slot 0 in the file."""

    name: str
    offset: int
    plane_bytes: int
    tensors: tuple[TensorRecord, ...]


class LayoutRecord(Record):
    """A `StateLayout` as JSON: enough to read the file without the program's rules."""

    slots: int = Field(ge=1, le=2)
    planes: tuple[str, ...] = Field(min_length=1)
    dtype: StateDtype
    chunk_bytes: int = Field(le=1 << 30)
    bytes: int
    blocks: tuple[BlockRecord, ...] = Field(min_length=1)


class Chunk(NamedTuple):
    """`bytes` bytes of plane number `plane`, from byte `start` of the plane."""

    plane: int
    start: int
    bytes: int


@dataclass(frozen=True)
class BlockLayout:
    """One block's tensors within a plane; `shapes.state.plane_layout` says how a plane differs."""

    name: str
    tensors: Layout

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane: a multiple of 4096."""
        return self.tensors.bytes


@dataclass(frozen=True)
class StateLayout:
    """The map of a `state.bin`.

    Attributes:
        blocks: in file order.
        planes: names, such as ("master", "m", "v"), all of one dtype.
        dtype: of every plane.
        chunk_bytes: a power of two, at least 4096.
        slots: 2 in a run, 1 in a snapshot.
    """

    blocks: tuple[BlockLayout, ...]
    planes: tuple[str, ...]
    dtype: StateDtype
    chunk_bytes: int
    slots: int = 2

    def __post_init__(self) -> None:
        if self.chunk_bytes < PAGE or self.chunk_bytes & (self.chunk_bytes - 1):
            raise ConfigError(
                f"io.chunk_bytes = {self.chunk_bytes} is not a power of two of at least {PAGE}.",
                "use 4194304",
            )
        if not all(block.plane_bytes for block in self.blocks):
            raise ConfigError("a block without parameters has no state.", "leave it out of the layout")

    @classmethod
    def of(
        cls, blocks: Sequence[Block], planes: Sequence[str], dtype: StateDtype, chunk_bytes: int
    ) -> StateLayout:
        """The layout of a run's state.

        Raises:
            ConfigError: `chunk_bytes` is not a power of two of at least 4096.
        """
        entries = tuple(BlockLayout(block.name, block.layout(dtype)) for block in blocks)
        return cls(entries, tuple(planes), dtype, chunk_bytes)

    @classmethod
    def from_record(cls, record: LayoutRecord, source: str) -> StateLayout:
        """Read it back.

        Raises:
            ConfigError: the offsets in the record do not follow the rule of this format.
        """
        blocks = tuple(
            BlockLayout(
                block.name,
                layout((TensorSpec(t.name, t.shape, record.dtype) for t in block.tensors), PAGE),
            )
            for block in record.blocks
        )
        result = cls(blocks, record.planes, record.dtype, record.chunk_bytes, record.slots)
        if result.record() != record:
            raise ConfigError(
                f"{source}: `layout` does not follow the rules of format 1.",
                "the file was written by another program; see docs/formats.md",
            )
        return result

    def record(self) -> LayoutRecord:
        """This layout as JSON-ready data."""
        return self._record

    @cached_property
    def _record(self) -> LayoutRecord:
        return LayoutRecord(
            slots=self.slots,
            planes=self.planes,
            dtype=self.dtype,
            chunk_bytes=self.chunk_bytes,
            bytes=self.bytes,
            blocks=tuple(
                BlockRecord(
                    name=block.name,
                    offset=self.offset(index, 0),
                    plane_bytes=block.plane_bytes,
                    tensors=tuple(
                        TensorRecord(name=e.name, shape=e.shape, offset=e.offset)
                        for e in block.tensors.entries
                    ),
                )
                for index, block in enumerate(self.blocks)
            ),
        )

    def with_slots(self, slots: int) -> StateLayout:
        """The same planes with another number of slots."""
        return replace(self, slots=slots)

    def with_chunk_bytes(self, chunk_bytes: int) -> StateLayout:
        """The same file cut into other chunks."""
        return replace(self, chunk_bytes=chunk_bytes)

    def same_file(self, other: StateLayout) -> bool:
        """Whether both put every tensor at the same byte (chunks may differ)."""
        return self.with_chunk_bytes(PAGE) == other.with_chunk_bytes(PAGE)

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        offsets = [0]
        for sizes in self._sizes:
            offsets.append(offsets[-1] + self.slots * sum(sizes))
        return tuple(offsets)

    @cached_property
    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """Per block, bytes of each of its planes."""
        planes = self.planes
        return tuple(
            tuple(plane_layout(name, block.tensors).bytes for name in planes) for block in self.blocks
        )

    @cached_property
    def _chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        return tuple(
            tuple(
                Chunk(plane, start, min(self.chunk_bytes, size - start))
                for plane, size in enumerate(sizes)
                for start in range(0, size, self.chunk_bytes)
            )
            for sizes in self._sizes
        )

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self._offsets[-1]

    @property
    def plane_bytes(self) -> int:
        """Bytes of one copy of the master plane of all blocks."""
        return sum(block.plane_bytes for block in self.blocks)

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy of all planes of all blocks."""
        return sum(self.block_bytes(block) for block in range(len(self.blocks)))

    def block_bytes(self, block: int) -> int:
        """Bytes of one slot of a block."""
        return sum(self._sizes[block])

    def offset(self, block: int, slot: int) -> int:
        """First byte of a slot in the file."""
        return self._offsets[block] + slot * self.block_bytes(block)

    def chunks(self, block: int) -> tuple[Chunk, ...]:
        """All chunks of a block: plane 0 from its start, then plane 1, ..."""
        return self._chunks[block]

    def pieces(self, block: int, plane: int = 0) -> int:
        """Chunks of one plane."""
        return -(-self._sizes[block][plane] // self.chunk_bytes)

    def index(self, block: int, plane: int, piece: int) -> int:
        """The number, among all chunks of a block, of a chunk of one plane."""
        return sum(self.pieces(block, before) for before in range(plane)) + piece

    def chunk_offset(self, block: int, slot: int, index: int) -> int:
        """First byte of a chunk in the file."""
        chunk = self._chunks[block][index]
        before = sum(self._sizes[block][: chunk.plane])
        return self.offset(block, slot) + before + chunk.start
