"""A model under one plan, as sizes: blocks, chunks, and which buffers live through a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from packmule.graph.kinds import BufferKind, Tier
from packmule.graph.work import Works, works_of
from packmule.shapes.bodies import Dtypes, dtypes
from packmule.shapes.groups import groups_of
from packmule.shapes.layout import ITEMSIZE, PAGE, round_up
from packmule.shapes.model import Block, ModelShape
from packmule.shapes.module import Shape
from packmule.shapes.state import STATES, plane_layout
from packmule.spec.plan import Placement, Plan

RUN = 4
"""Chunks of every plane that are moved at once where none waits for another: fewer pauses between them."""


@dataclass(frozen=True)
class PlannedModel:
    """Model shape and plan together; every size a graph needs follows from these two."""

    shape: Shape
    plan: Plan

    @property
    def planes(self) -> tuple[str, ...]:
        """Of the plan's update rule, master first."""
        return STATES[self.plan.numerics.optimizer.rule].planes

    def __post_init__(self) -> None:
        # The shape as the plan cuts it.
        object.__setattr__(self, "shape", self.shape.cut(self.plan.numerics.vocabulary_parts))
        if self.plan.device_updates and (self.whole_updates or self.plan.device is None):
            raise ValueError("chunks are updated on a device, by a rule that looks at elements alone")

    @cached_property
    def types(self) -> Dtypes:
        """Dtypes of the plan's numerics."""
        return dtypes(self.plan.numerics)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Embed, layers, head."""
        return self.shape.blocks()

    @cached_property
    def _openings(self) -> tuple[int, ...]:
        return tuple(block.index for block in self.blocks if block.kind == "layer")

    def opening(self, block: int) -> int:
        """The first block of the layer that a block belongs to."""
        return self._openings[self.blocks[block].layer]

    def following(self, block: int) -> int:
        """The block whose input is the output of this one's layer (or of the embedding)."""
        layer = self.blocks[block].layer + 1
        return self._openings[layer] if layer < len(self._openings) else len(self.blocks) - 1

    def closes(self, block: int) -> bool:
        """Whether a block is the last of its layer."""
        return self.blocks[block + 1].layer != self.blocks[block].layer

    @property
    def cut(self) -> bool:
        """Whether the vocabulary is cut into parts."""
        return isinstance(self.shape, ModelShape) and self.shape.vocabulary_parts > 1

    @cached_property
    def embedding(self) -> tuple[int, ...]:
        """The blocks that hold the embedding."""
        return tuple(block.index for block in self.blocks if block.kind == "embed")

    @cached_property
    def head_parts(self) -> tuple[int, ...]:
        """The blocks that hold the head's matrix, where the vocabulary is cut."""
        if self.shape.tied:
            return self.embedding
        return tuple(block.index for block in self.blocks if block.kind == "logits")

    def halved(self, block: int) -> bool:
        """Whether a gradient goes to disk between the head's contributions and the embedding's."""
        on_disk = self.plan.placement.gradients == "disk"
        return self.cut and self.shape.tied and on_disk and self.blocks[block].kind == "embed"

    @cached_property
    def routed_layers(self) -> int:
        """Layers with experts."""
        return sum(self.works.experts(block) is not None for block in self._openings)

    @cached_property
    def first_routed(self) -> int:
        """The first block of the first of them; -1: there is none."""
        found = [block.index for block in self.blocks if block.kind == "experts"]
        return self.opening(found[0]) if found else -1

    def recomputes(self, block: int) -> bool:
        """Whether the backward of a block's layer runs its forward again."""
        return self.plan.recompute[self.blocks[block].layer]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Blocks that take turns; empty where every step trains all."""
        turns = self.plan.numerics.turns
        return () if turns is None else groups_of(self.blocks, turns)

    @property
    def two_passes(self) -> bool:
        """Whether a step runs backward twice: for the norm, then to update blocks on the way."""
        return self.plan.update == "on-backward" and self.plan.numerics.clip is not None

    @cached_property
    def plane_bytes(self) -> tuple[int, ...]:
        """Per block, bytes of one plane (masters, and also gradients: same dtype)."""
        return tuple(block.layout(self.types.master).bytes for block in self.blocks)

    @cached_property
    def weight_bytes(self) -> tuple[int, ...]:
        """Per block, bytes of its parameters in the compute dtype."""
        return tuple(block.layout(self.types.compute).bytes for block in self.blocks)

    def chunks(self, block: int) -> tuple[tuple[int, int], ...]:
        """(start, bytes) of each streamed piece of one plane of a block."""
        return self._chunks[block]

    @cached_property
    def _chunks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        step = self.plan.io.chunk_bytes
        pieces = ([(at, min(step, size - at)) for at in range(0, size, step)] for size in self.plane_bytes)
        return tuple(tuple(each) for each in pieces)

    def runs(self, block: int) -> list[range]:
        """Its chunks in runs of `RUN`, as resident state is stored and loaded."""
        count = len(self.chunks(block))
        return [range(first, min(first + RUN, count)) for first in range(0, count, RUN)]

    @cached_property
    def plane_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Per block, bytes of each plane."""
        layouts = [block.layout(self.types.master) for block in self.blocks]
        return tuple(tuple(plane_layout(name, masters).bytes for name in self.planes) for masters in layouts)

    def part_bytes(self, block: int, part: int) -> int:
        """Bytes of what moves with a chunk of the masters: the same chunk of the planes that are laid out
        as they are; with the first one, all of the others."""
        size, (masters, *others) = self.chunks(block)[part][1], self.plane_sizes[block]
        more = (size if other == masters else other * (part == 0) for other in others)
        return size + sum(more)

    @cached_property
    def _first_chunks(self) -> tuple[int, ...]:
        """Per block, how many chunks those before it have."""
        counts = [len(self.chunks(block.index)) for block in self.blocks]
        return tuple(sum(counts[:block]) for block in range(len(counts)))

    def updates_there(self, block: int) -> tuple[int, ...]:
        """The chunks of a block that the device updates: of all the model's in order, as many per hundred as
        the plan says, evenly spread."""
        share, first = self.plan.device_updates, self._first_chunks[block]
        if not share:
            return ()
        numbers = range(first, first + len(self.chunks(block)))
        return tuple(n - first for n in numbers if (n + 1) * share // 100 > n * share // 100)

    def weights_span(self, block: int, part: int) -> tuple[int, int]:
        """(start, end) of what a chunk of a block's masters becomes, in bytes of its compute weights."""
        start, size = self.chunks(block)[part]
        entries = self.blocks[block].layout(self.types.master).entries
        weights, item = self.blocks[block].layout(self.types.compute), ITEMSIZE[self.types.compute]
        ends: list[int] = []
        for entry in entries:
            low, high = max(entry.offset, start), min(entry.offset + entry.bytes, start + size)
            if low < high:
                at = weights[entry.name].offset
                ends += [
                    at + (place - entry.offset) // ITEMSIZE[self.types.master] * item for place in (low, high)
                ]
        return (ends[0], ends[-1]) if ends else (0, 0)

    @property
    def whole_updates(self) -> bool:
        """The rule needs all of a tensor at once."""
        return STATES[self.plan.numerics.optimizer.rule].whole

    @property
    def casts(self) -> bool:
        """Compute weights differ from masters in dtype."""
        return self.types.compute != self.types.master

    def place(self, block: int) -> Placement:
        """Where a block's buffers live in RAM and on disk: as the plan says, but for weights kept in spare
        RAM, or on the device, of which there is no copy elsewhere."""
        place = self.plan.placement
        if self.on_device(block):
            return place.model_copy(update={"weights": "state"})
        if place.weights == "ram" or block not in self.outermost[: place.kept_weights]:
            return place
        return place.model_copy(update={"weights": "ram"})

    def on_device(self, block: int) -> bool:
        """Whether a block's compute weights stay on the device, from update to update."""
        return block in self.outermost[: self.plan.placement.device_weights]

    def holds_state(self, block: int) -> bool:
        """Whether a block's state is in RAM between its uses: all are, or this one is kept in spare RAM.

        What a run will read next is known: every block once a step, always in the same order. Then the best
        cache (Belady 1966) holds some blocks all the time and leaves the others alone."""
        place = self.plan.placement
        return place.state == "ram" or block in self.outermost[: place.kept_state]

    @cached_property
    def outermost(self) -> tuple[int, ...]:
        """Blocks from the ends of the model inwards: transfers of outer ones have least to hide behind."""
        last = len(self.blocks) - 1
        return tuple(sorted(range(last + 1), key=lambda block: min(block, last - block)))

    def master_is_weights(self, block: int) -> bool:
        """Whether a block's resident master plane serves as the compute weights, or is what a device is
        sent."""
        return self.holds_state(block) and self.place(block).weights == "state" and not self.casts

    @property
    def decoder(self) -> ModelShape:
        """The shape, of a model that is a decoder."""
        if not isinstance(self.shape, ModelShape):
            raise TypeError("modules of a user's own have no decoder's shape")
        return self.shape

    @cached_property
    def works(self) -> Works:
        """What its compute tasks take."""
        return works_of(self.shape, self.types, self.plan.numerics.loss_chunk, self.plane_bytes)

    def norm_bytes(self, block: int) -> int:
        """Bytes of a block's sums of squares, whole pages."""
        return round_up(len(self.blocks[block].parameters) * ITEMSIZE["float64"], PAGE)

    def input_bytes(self, tokens: int) -> int:
        """Bytes of one block input, whole pages."""
        return round_up(self.shape.stream_bytes(tokens, self.types), PAGE)

    @cached_property
    def residents(self) -> Residents:
        """Buffers that keep their place through all graphs of the run."""
        plan, place = self.plan, self.plan.placement
        table = Residents()
        for block in self.blocks:
            index, plane = block.index, self.plane_bytes[block.index]
            if self.holds_state(index):
                table.add(BufferKind.STATE, Tier.RAM, index, sum(self.plane_sizes[index]))
            if self.place(index).weights == "ram":
                table.add(BufferKind.WEIGHTS, Tier.RAM, index, self.weight_bytes[index])
            if self.place(index).weights == "disk":
                table.add(BufferKind.WEIGHTS, Tier.DISK, index, self.weight_bytes[index])
            if self.on_device(index):
                table.add(BufferKind.WEIGHTS, Tier.DEVICE, index, self.weight_bytes[index])
            if plan.device is not None:
                # Else the device would wait for memory that the cores still use.
                table.add(BufferKind.NORMS, Tier.RAM, index, self.norm_bytes(index))
            if place.gradients == "disk" and (plan.update != "on-backward" or self.halved(index)):
                for part, (_, size) in enumerate(self.chunks(index)):
                    table.add(BufferKind.GRADIENT_CHUNK, Tier.DISK, index, size, part)
            elif plan.update == "on-fetch":
                table.add(BufferKind.GRADIENT, Tier.RAM, index, plane)
            for part in range(len(self.chunks(index))):
                table.add(BufferKind.SLOT, Tier.SLOTS, index, self.part_bytes(index, part), part)
                if plan.checkpoint.snapshot_steps:
                    table.add(BufferKind.COPY, Tier.SNAPSHOT, index, self.part_bytes(index, part), part)
        if plan.numerics.clip is not None and plan.update == "on-fetch":
            table.add(BufferKind.SCALE, Tier.RAM, -1, PAGE)
        return table


@dataclass
class Residents:
    """Offsets of persistent buffers, one after the other per tier.

    `places` maps (kind, tier, block, part) to (offset, bytes).
    """

    places: dict[tuple[int, int, int, int], tuple[int, int]] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    def add(self, kind: int, tier: int, block: int, size: int, part: int = -1) -> None:
        """Place the next buffer."""
        self.places[kind, tier, block, part] = (self.bytes[tier], size)
        self.bytes[tier] += round_up(size, PAGE)

    def of_kind(self, kind: int, tier: int = Tier.RAM) -> int:
        """Bytes of one kind in one tier."""
        return sum(size for (k, t, _, _), (_, size) in self.places.items() if k == kind and t == tier)
