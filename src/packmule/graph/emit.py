"""Emitter: the tasks of one block's life (fetch, run, update, store), each in one place.

Builders in `training` and `phases` arrange these into graphs. An `Op` adds one or more tasks when
called; a `Stream` is a list of (read, rest) pairs whose reads may run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from packmule.graph.builder import GraphBuilder
from packmule.graph.costs import Costs
from packmule.graph.kinds import COMPUTE, SECOND, UPDATES, BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.step import StepGraph
from packmule.graph.traffic import RECEIVES, SENDS
from packmule.shapes import bodies
from packmule.shapes.layout import PAGE, TensorSpec, layout

Op = Callable[[], None]


@dataclass(frozen=True)
class Piece:
    """One step of a stream.

    Attributes:
        read: what reads from disk.
        rest: what follows on the cores, to disk and over the link.
        send: of a fetch: what then goes to a device; it stands one visit before its use, not among the rest.
    """

    read: Op | None
    rest: Op | None
    send: Op | None = None


Stream = list[Piece]


def in_order(stream: Stream, ahead: int) -> tuple[list[Op], list[Op]]:
    """(lead, units): the first `ahead` reads; then each piece's rest with a later piece's read."""
    stream = [piece for piece in stream if piece.send is None or piece.read or piece.rest]
    reads = [piece.read for piece in stream]
    lead = [read for read in reads[:ahead] if read is not None]

    def unit(rest: Op | None, read: Op | None) -> Op:
        def emit() -> None:
            if rest is not None:
                rest()
            if read is not None:
                read()

        return emit

    later = [*reads[ahead:], *([None] * ahead)]
    return lead, [unit(piece.rest, read) for piece, read in zip(stream, later, strict=False)]


class Emitter:
    """Adds the tasks of one planned model to a builder.

    Args:
        snapshot: whatever is stored in the slots is also written to a snapshot, which the commit ends with.
    """

    def __init__(self, model: PlannedModel, costs: Costs, mean_length: float, snapshot: bool = False) -> None:
        threads = model.plan.numerics.threads
        self.snapshot = snapshot
        self.model = model
        self.costs = costs
        self.mean_length = mean_length
        resources = {"cores": threads, "disk": 1}
        self._cores, self._disk = {"cores": threads}, {"disk": 1}
        self._reading: bool | None = None
        self._compute, self.computing, self.near = self._cores, costs, Tier.RAM
        tiers = [tier for tier in Tier if tier != Tier.DEVICE]
        if model.plan.device is not None:
            if costs.device is None:
                raise ValueError("a plan for a device needs its rates")
            # Both directions of a link are used at once, beside the computation.
            resources |= {"device": 1, "h2d": 1, "d2h": 1}
            self._compute, self.computing, self.near = {"device": 1}, costs.device.compute, Tier.DEVICE
            tiers = list(Tier)
        self.builder = GraphBuilder(resources, [tier.name.lower() for tier in tiers], PAGE)
        self._resident: dict[tuple[int, int, int, int], int] = {}
        self.start = dict(model.residents.bytes)

    def build(self) -> StepGraph:
        """The graph of everything emitted."""
        plan = self.model.plan
        overlapped = COMPUTE if plan.io.prefetch else ()
        alternating = () if plan.device is None or not plan.io.prefetch else (*SENDS, *RECEIVES, *UPDATES)
        return self.builder.build(self.start, overlapped, alternating)

    # Buffers

    def resident(self, kind: BufferKind, tier: Tier, block: int, part: int = -1) -> int:
        """A persistent buffer of the run, declared on first use."""
        key = (kind, tier, block, part)
        if key not in self._resident:
            offset, size = self.model.residents.places[key]
            self._resident[key] = self.builder.buffer(kind, tier, size, at=offset, block=block, part=part)
        return self._resident[key]

    def has_resident(self, kind: BufferKind, tier: Tier, block: int) -> bool:
        """Whether the run keeps such a buffer."""
        return (kind, tier, block, -1) in self.model.residents.places

    def ram(self, kind: BufferKind, size: int, block: int = -1, micro: int = -1, part: int = -1) -> int:
        """A transient buffer in the arena."""
        return self.builder.buffer(kind, Tier.RAM, size, block=block, micro=micro, part=part)

    def work(self, kind: BufferKind, size: int, block: int = -1, micro: int = -1, part: int = -1) -> int:
        """A transient buffer where the model is computed: on the device, or in the arena."""
        return self.builder.buffer(kind, self.near, size, block=block, micro=micro, part=part)

    def scratch(self, specs: Iterable[TensorSpec], block: int, micro: int = -1) -> int:
        """One task's temporaries."""
        return self.work(BufferKind.SCRATCH, layout(specs).bytes, block, micro)

    # Disk tasks

    def disk_task(
        self,
        kind: TaskKind,
        size: int,
        reads: list[int],
        writes: list[int],
        block: int,
        micro: int = -1,
        part: int = -1,
        partly: Collection[int] = (),
    ) -> None:
        """A transfer of `size` bytes."""
        reading = kind.name.startswith("READ")
        seconds = self.costs.read(size) if reading else self.costs.write(size)
        if self._reading not in (None, reading):  # program order is the order in which the disk is used
            seconds += self.costs.turnaround_seconds
        self._reading = reading
        self.builder.task(
            kind,
            self._disk,
            reads=reads,
            writes=writes,
            seconds=seconds,
            moved=size,
            block=block,
            micro=micro,
            part=part,
            partly=partly,
        )

    def task(
        self,
        kind: TaskKind,
        seconds: float,
        reads: list[int],
        writes: list[int],
        block: int,
        micro: int = -1,
        part: int = -1,
        workspace: int = 0,
        near: bool = False,
        partly: Collection[int] = (),
    ) -> None:
        """Work on all threads.

        Args:
            near: where the model is computed: on the device, if there is one.
            partly: as in `GraphBuilder.task`.
        """
        self.builder.task(
            kind,
            self._compute if near else self._cores,
            reads=reads,
            writes=writes,
            seconds=seconds,
            workspace=workspace,
            block=block,
            micro=micro,
            part=part,
            partly=partly,
        )

    # The link to a device

    def link_task(
        self,
        kind: TaskKind,
        size: int,
        source: int,
        target: int,
        block: int,
        micro: int = -1,
        part: int = -1,
        partly: Collection[int] = (),
    ) -> None:
        """A transfer of `size` bytes from RAM to the device (SEND_*), or back."""
        rates, sends = self.costs.device, kind.name.startswith("SEND")
        if rates is None:
            raise ValueError("a plan without a device has no link")
        self.builder.task(
            kind,
            {"h2d" if sends else "d2h": 1},
            reads=[source],
            writes=[target],
            seconds=rates.send(size) if sends else rates.receive(size),
            moved=size,
            block=block,
            micro=micro,
            part=part,
            partly=partly,
        )

    # Weights

    def weights(self, block: int) -> tuple[Stream, list[int]]:
        """How to get a block's compute weights to where it is computed: (stream, buffers they lie in)."""
        if self.model.on_device(block):
            return [], [self.resident(BufferKind.WEIGHTS, Tier.DEVICE, block)]
        return self.sent(block, *self._weights_in_ram(block))

    def sent(self, block: int, stream: Stream, source: list[int]) -> tuple[Stream, list[int]]:
        """`weights` from a stream that has them in RAM at its end, in `source`: where a device computes,
        they are sent on to it, whole."""
        if self.near != Tier.DEVICE:
            return stream, source
        target = self.near_weights(block)
        return [*stream, Piece(None, None, partial(self._send_weights, block, source[0], target))], [target]

    def near_weights(self, block: int) -> int:
        """The buffer of a block's compute weights on the device."""
        if self.model.on_device(block):
            return self.resident(BufferKind.WEIGHTS, Tier.DEVICE, block)
        return self.work(BufferKind.WEIGHTS, self.model.weight_bytes[block], block)

    def renew(self, block: int, source: int) -> Piece:
        """Weights that stay on the device after an update."""
        target = self.resident(BufferKind.WEIGHTS, Tier.DEVICE, block)
        return Piece(None, partial(self._send_weights, block, source, target))

    def _send_weights(self, block: int, source: int, target: int) -> None:
        self.link_task(TaskKind.SEND_WEIGHTS, self.model.weight_bytes[block], source, target, block)

    def _weights_in_ram(self, block: int) -> tuple[Stream, list[int]]:
        model, place = self.model, self.model.place(block)
        if model.master_is_weights(block):
            return [], [self.resident(BufferKind.STATE, Tier.RAM, block)]
        if place.weights == "ram":
            return [], [self.resident(BufferKind.WEIGHTS, Tier.RAM, block)]
        target = self.ram(BufferKind.WEIGHTS, model.weight_bytes[block], block)
        if place.weights == "disk":
            source = self.resident(BufferKind.WEIGHTS, Tier.DISK, block)
            size = model.weight_bytes[block]
            return [
                Piece(lambda: self.disk_task(TaskKind.READ_WEIGHTS, size, [source], [target], block), None)
            ], [target]
        if model.holds_state(block):
            state = self.resident(BufferKind.STATE, Tier.RAM, block)
            return [Piece(None, lambda: self.cast(state, target, block, -1, model.plane_bytes[block]))], [
                target
            ]
        return self.master_stream(block, target), [target]

    def master_stream(self, block: int, target: int) -> Stream:
        """Read the master plane from its slot into compute weights, chunk by chunk."""
        stream = []
        for part, (_, size) in enumerate(self.model.chunks(block)):
            slot = self.resident(BufferKind.SLOT, Tier.SLOTS, block, part)
            if not self.model.casts:
                stream.append(Piece(self.read(TaskKind.READ_VERIFIED, size, slot, target, block, part), None))
                continue
            chunk = self.ram(BufferKind.MASTER_CHUNK, size, block, part=part)
            stream.append(
                Piece(
                    self.read(TaskKind.READ_STATE, size, slot, chunk, block, part),
                    partial(self.cast, chunk, target, block, part, size),
                )
            )
        return stream

    def read(self, kind: TaskKind, size: int, source: int, target: int, block: int, part: int) -> Op:
        """A chunk from disk."""
        return lambda: self.disk_task(kind, size, [source], [target], block, part=part)

    def cast(self, source: int, target: int, block: int, part: int, size: int) -> None:
        """Masters (`size` bytes of them) to compute weights."""
        self.task(TaskKind.CAST, self.costs.compute(moved=size * 1.5), [source], [target], block, part=part)

    # Slots

    def slots(self, block: int, parts: range) -> tuple[list[int], int]:
        """The slots of some chunks of a block, and the bytes of these chunks in all planes."""
        slots = [self.resident(BufferKind.SLOT, Tier.SLOTS, block, part) for part in parts]
        return slots, sum(self.model.part_bytes(block, part) for part in parts)

    def store(self, state: int, block: int, parts: range, partly: Collection[int] = ()) -> Op:
        """Write some chunks of every plane to their slots, and to the snapshot under way while they are in
        RAM."""

        def emit() -> None:
            slots, size = self.slots(block, parts)
            chunk, to = parts.start, self.disk_task
            to(TaskKind.WRITE_STATE, size, [state], slots, block, part=chunk, partly=partly)
            if self.snapshot:
                copies = [self.resident(BufferKind.COPY, Tier.SNAPSHOT, block, part) for part in parts]
                to(TaskKind.WRITE_SNAPSHOT, size, [state], copies, block, part=chunk, partly=partly)

        return emit

    def store_weights(self, block: int, source: int) -> Op:
        """Write compute weights to work.bin."""
        size = self.model.weight_bytes[block]
        stored = self.resident(BufferKind.WEIGHTS, Tier.DISK, block)
        return lambda: self.disk_task(TaskKind.WRITE_WEIGHTS, size, [source], [stored], block)

    def stores(self, block: int) -> Stream:
        """Write a block's resident state to its slot."""
        state = self.resident(BufferKind.STATE, Tier.RAM, block)
        return [Piece(None, self.store(state, block, parts)) for parts in self.model.runs(block)]

    def copies(self, block: int) -> Stream:
        """Copy a block's state from its slot to the snapshot under way, if there is one."""
        stream: Stream = []
        for part in range(len(self.model.chunks(block)) if self.snapshot else 0):
            total = self.model.part_bytes(block, part)
            slot = self.resident(BufferKind.SLOT, Tier.SLOTS, block, part)
            copy = self.resident(BufferKind.COPY, Tier.SNAPSHOT, block, part)
            chunk = self.ram(BufferKind.STATE_CHUNK, total, block, part=part)
            read = self.read(TaskKind.READ_VERIFIED, total, slot, chunk, block, part)
            write = partial(self.disk_task, TaskKind.WRITE_SNAPSHOT, total, [chunk], [copy], block, part=part)
            stream.append(Piece(read, write))
        return stream

    def seal(self) -> None:
        """Replace HEAD, when everything is in its slots; then the snapshot is whole too."""
        model = self.model
        counts = {block.index: len(model.chunks(block.index)) for block in model.blocks}
        parts = [(block, part) for block, count in counts.items() for part in range(count)]
        slots = [self.resident(BufferKind.SLOT, Tier.SLOTS, *place) for place in parts]
        seconds = 4 * self.costs.sync_seconds
        self.builder.task(TaskKind.COMMIT, self._disk, reads=slots, writes=slots, seconds=seconds)
        if self.snapshot:
            copies = [self.resident(BufferKind.COPY, Tier.SNAPSHOT, *place) for place in parts]
            used = [*slots, *copies]
            self.builder.task(TaskKind.SNAPSHOT, self._disk, reads=used, writes=copies, seconds=seconds)

    def validate(self, scale: int) -> None:
        """Replace HEAD if the clip factor is one; else what it names is what there is."""
        parts = [
            (b.index, part) for b in self.model.blocks for part in range(len(self.model.chunks(b.index)))
        ]
        slots = [self.resident(BufferKind.SLOT, Tier.SLOTS, *place) for place in parts]
        seconds = 4 * self.costs.sync_seconds
        self.builder.task(TaskKind.VALIDATE, self._disk, reads=[*slots, scale], writes=slots, seconds=seconds)

    def commit(self) -> Stream:
        """Make the state durable: write what lies in RAM, then replace HEAD."""
        stream: Stream = []
        if self.model.plan.placement.state == "ram":
            for block in self.model.blocks:
                stream += self.stores(block.index)
        return [*stream, Piece(None, self.seal)]

    # Compute

    def compute(
        self,
        kind: TaskKind,
        tokens: int,
        reads: list[int],
        writes: list[int],
        block: int,
        micro: int,
        recompute: bool = True,
        again: bool = False,
        frozen: bool = False,
    ) -> None:
        """A task of the model's own, with the scratch it needs.

        Args:
            tokens: most tokens of its micro-batch.
            recompute: a backward runs forward again.
            again: it belongs to the second backward of a step that has two.
            frozen: a backward gives the gradient of its input alone.
        """
        works = self.model.works
        size = works.scratch(kind, block, tokens)
        scratch = [self.work(BufferKind.SCRATCH, size, block, micro)] if size else []
        self.task(
            kind,
            works.seconds(kind, block, tokens, self.computing, self.mean_length, recompute, frozen),
            reads,
            [*writes, *scratch],
            block,
            micro,
            SECOND if again else -1,
            workspace=works.workspace(kind, block, tokens),
            near=True,
        )

    def saved(self, block: int, tokens: int, micro: int) -> list[int]:
        """The buffer of what a layer's backward needs from its forward; none where that is nothing."""
        size = self.model.works.saved(block, tokens)
        return [self.work(BufferKind.SAVED, size, block, micro)] if size else []

    def experts_seconds(self, block: int, tokens: int, factor: float = 1.0) -> float:
        """Seconds of a group of experts, if each gets as many tokens as any other."""
        layer, count = self.model.decoder.layer(block), len(self.model.blocks[block].experts)
        matmul = bodies.experts_flops(layer, tokens, count)
        moved = bodies.experts_moved(layer, tokens, self.model.types, count)
        return self.computing.compute(matmul * factor, moved=moved * factor)


def all_of(ops: list[Op]) -> Op | None:
    """Several tasks as one op."""
    if not ops:
        return None

    def emit() -> None:
        for op in ops:
            op()

    return emit
