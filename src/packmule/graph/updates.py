"""Updates: the tasks that apply the rule to a block, whole or chunk by chunk, on the cores or on the device.

Where a plan has the device update some chunks (Deep Optimizer States: Maurya et al. 2024, arXiv:2410.21316),
the state of such a chunk is sent there, updated and received again, while the cores update others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from packmule.graph.emit import Emitter, Op, Piece, Stream, all_of
from packmule.graph.gradients import Gradient
from packmule.graph.kinds import BufferKind, TaskKind, Tier


@dataclass(frozen=True)
class Targets:
    """Buffers of the compute weights that an update fills in the same pass.

    Attributes:
        ram: in RAM.
        near: on a device; where chunks are updated in two places, it gets all of them.
        kept: what is in RAM is needed beyond the update, of all chunks.
    """

    ram: int | None = None
    near: int | None = None
    kept: bool = True


@dataclass(frozen=True)
class _Shared:
    """An update of a block whose chunks cores and device share.

    Attributes:
        kind: UPDATE or UPDATE_AHEAD.
        scales: the clip factor's buffer, if there is one.
    """

    kind: TaskKind
    block: int
    gradient: Gradient
    scales: list[int]
    targets: Targets


@dataclass(frozen=True)
class _Chunk:
    """A chunk's tasks.

    Attributes:
        read: bring what the update needs.
        update: the rule.
        flush: what follows, which may lag behind.
    """

    read: list[Op]
    update: Op
    flush: list[Op]


class Updates:
    """Adds updates to what an emitter builds.

    Args:
        commit: the graph makes state durable. With state in RAM it may be the next step's commit that its
            updates are summed for: of these there are as many.
    """

    def __init__(self, emitter: Emitter, commit: bool) -> None:
        self.emitter, self.model = emitter, emitter.model
        self.on_disk = self.model.plan.placement.state == "disk"
        self.summed = self.on_disk or commit

    def splits(self, block: int) -> bool:
        """Whether the device updates some of a block's chunks."""
        return bool(self.model.updates_there(block))

    def here(self, block: int) -> bool:
        """Whether the cores update any."""
        return len(self.model.updates_there(block)) < len(self.model.chunks(block))

    def apply(
        self,
        block: int,
        gradient: Gradient,
        scale: int | None,
        targets: Targets,
        kind: TaskKind = TaskKind.UPDATE,
    ) -> Stream:
        """Apply the rule to a block.

        Args:
            scale: the clip factor's buffer, or None.
            kind: UPDATE or UPDATE_AHEAD.
        """
        scales = [] if scale is None else [scale]
        if self.splits(block):
            return self._split(_Shared(kind, block, gradient, scales, targets))
        filled = [] if targets.ram is None else [targets.ram]
        return self._on_cores(kind, block, gradient.ram, scales, filled)

    # On the cores

    def _on_cores(
        self, kind: TaskKind, block: int, gradient: int | None, scales: list[int], targets: list[int]
    ) -> Stream:
        emitter, model, stream = self.emitter, self.model, []
        resident = self._resident(block)
        if not self.on_disk and resident is not None and gradient is not None:
            size = model.plane_bytes[block]
            return [Piece(None, self._rule(kind, size, [gradient, *scales], [resident, *targets], block, -1))]
        if model.whole_updates:
            return self._whole(kind, block, gradient, scales, targets)
        for part, (_, size) in enumerate(model.chunks(block)):
            reads: list[Op] = []
            rests: list[Op] = []
            source = gradient
            if source is None:
                source, read = self._gradient_chunk(block, part)
                reads.append(read)
            state = resident
            if state is None:
                state, read = self._state_chunk(TaskKind.READ_STATE, block, part)
                reads.append(read)
            if self.on_disk:
                rests.append(emitter.store(state, block, range(part, part + 1)))
            update = self._rule(kind, size, [source, *scales], [state, *targets], block, part)
            stream.append(Piece(all_of(reads), all_of([update, *rests])))
        return stream

    def _whole(
        self, kind: TaskKind, block: int, gradient: int | None, scales: list[int], targets: list[int]
    ) -> Stream:
        """By a rule that needs all of a tensor: what is not in RAM whole is brought there."""
        emitter, model, chunks = self.emitter, self.model, self.model.chunks(block)
        stream: Stream = []
        if gradient is None:
            gradient = emitter.ram(BufferKind.GRADIENT, model.plane_bytes[block], block)
            for part, (_, size) in enumerate(chunks):
                stored = emitter.resident(BufferKind.GRADIENT_CHUNK, Tier.DISK, block, part)
                read = emitter.read(TaskKind.READ_GRADIENT, size, stored, gradient, block, part)
                stream.append(Piece(read, None))
        state = self._resident(block)
        if state is None:
            state = emitter.ram(BufferKind.STATE, sum(model.plane_sizes[block]), block)
            for part in range(len(chunks)):
                slot = emitter.resident(BufferKind.SLOT, Tier.SLOTS, block, part)
                total = model.part_bytes(block, part)
                stream.append(Piece(emitter.read(TaskKind.READ_STATE, total, slot, state, block, part), None))
        stores: list[Op] = []
        if self.on_disk:
            stores = [emitter.store(state, block, range(part, part + 1)) for part in range(len(chunks))]
        size = model.plane_bytes[block]
        update = self._rule(kind, size, [gradient, *scales], [state, *targets], block, -1)
        return [*stream, Piece(None, update), *(Piece(None, store) for store in stores)]

    def _resident(self, block: int) -> int | None:
        if not self.model.holds_state(block):
            return None
        return self.emitter.resident(BufferKind.STATE, Tier.RAM, block)

    def _gradient_chunk(self, block: int, part: int) -> tuple[int, Op]:
        """(its buffer, what reads it from disk)"""
        emitter, size = self.emitter, self.model.chunks(block)[part][1]
        stored = emitter.resident(BufferKind.GRADIENT_CHUNK, Tier.DISK, block, part)
        chunk = emitter.ram(BufferKind.GRADIENT_CHUNK, size, block, part=part)
        return chunk, emitter.read(TaskKind.READ_GRADIENT, size, stored, chunk, block, part)

    def _state_chunk(self, kind: TaskKind, block: int, part: int) -> tuple[int, Op]:
        """(its buffer, what reads it from its slot)"""
        emitter, total = self.emitter, self.model.part_bytes(block, part)
        slot = emitter.resident(BufferKind.SLOT, Tier.SLOTS, block, part)
        chunk = emitter.ram(BufferKind.STATE_CHUNK, total, block, part=part)
        return chunk, emitter.read(kind, total, slot, chunk, block, part)

    def _rule(
        self,
        kind: TaskKind,
        size: int,
        reads: list[int],
        writes: list[int],
        block: int,
        part: int,
        there: bool = False,
        partly: tuple[int, ...] = (),
    ) -> Op:
        """The rule on `size` bytes of each plane.

        Args:
            there: on the device.
            partly: as in `GraphBuilder.task`.
        """
        # A rule that needs all of a tensor looks at gradient and masters before.
        planes = 3 if self.model.whole_updates else len(self.model.planes)
        moved, costs = size * (2 * planes + 1.5), self.emitter.costs
        workspace = 0
        if there and costs.device is not None:
            seconds, workspace = costs.device.update(moved), costs.device.update_workspace(size)
        else:
            # What is read and what is stored is summed.
            seconds = costs.compute(moved=moved + size * len(self.model.planes) * self.summed)
        task = partial(self.emitter.task, workspace=workspace, near=there, partly=partly)
        return lambda: task(kind, seconds, reads, writes, block, part=part)

    # On cores and device

    def _split(self, shared: _Shared) -> Stream:
        """Chunk by chunk. What follows an update stands behind the next one, so that neither cores nor device
        wait for what has not come over the link yet; chunks are stored in their order."""
        stream: Stream = []
        late: list[Op] = []
        there = self.model.updates_there(shared.block)
        for part in range(len(self.model.chunks(shared.block))):
            chunk = (self._chunk_there if part in there else self._chunk_here)(shared, part)
            stream.append(Piece(all_of(chunk.read), all_of([chunk.update, *late])))
            late = chunk.flush
        return [*stream, Piece(None, all_of(late))]

    def _chunk_here(self, shared: _Shared, part: int) -> _Chunk:
        block, gradient, targets = shared.block, shared.gradient, shared.targets
        emitter, size = self.emitter, self.model.chunks(block)[part][1]
        reads: list[Op] = []
        flush: list[Op] = []
        source, state = gradient.ram, self._resident(block)
        if source is None and gradient.near is not None:
            source = emitter.ram(BufferKind.GRADIENT_CHUNK, size, block, part=part)
            receive = TaskKind.RECEIVE_GRADIENT
            reads.append(self._link(receive, size, gradient.near, source, block, part))
        elif source is None:
            source, read = self._gradient_chunk(block, part)
            reads.append(read)
        if state is None:
            state, read = self._state_chunk(TaskKind.READ_STATE, block, part)
            reads.append(read)
        filled = () if targets.ram is None else (targets.ram,)
        partly = (state, *filled)
        reading, writing = [source, *shared.scales], [state, *filled]
        update = self._rule(shared.kind, size, reading, writing, block, part, partly=partly)
        if targets.near is not None:
            made = state if targets.ram is None else targets.ram
            flush.append(self._send_weights(block, part, made, targets.near))
        if self.on_disk:
            flush.append(emitter.store(state, block, range(part, part + 1), partly=(state,)))
        return _Chunk(reads, update, flush)

    def _chunk_there(self, shared: _Shared, part: int) -> _Chunk:
        block, gradient, targets = shared.block, shared.gradient, shared.targets
        emitter, model = self.emitter, self.model
        size, total = model.chunks(block)[part][1], model.part_bytes(block, part)
        low, high = model.weights_span(block, part)
        reads: list[Op] = []
        before = after = self._resident(block)
        if before is None or after is None:
            # It is verified and summed by the disk's lane: no task of the cores touches it.
            before, read = self._state_chunk(TaskKind.READ_VERIFIED, block, part)
            after = emitter.ram(BufferKind.STATE_CHUNK, total, block, part=part)
            reads.append(read)
        state = emitter.work(BufferKind.STATE_CHUNK, total, block, part=part)
        reads.append(self._link(TaskKind.SEND_STATE, total, before, state, block, part))
        source = gradient.near
        if source is None:
            in_ram = gradient.ram
            if in_ram is None:
                in_ram, read = self._gradient_chunk(block, part)
                reads.append(read)
            source = emitter.work(BufferKind.GRADIENT_CHUNK, size, block, part=part)
            reads.append(self._link(TaskKind.SEND_GRADIENT, size, in_ram, source, block, part))
        back = targets.ram if targets.kept else None
        made = targets.near
        if made is None and back is not None:
            made = emitter.work(BufferKind.WEIGHTS_CHUNK, high - low, block, part=part)
        filled = () if made is None else (made,)
        reading, writing = [source, *shared.scales], [state, *filled]
        update = self._rule(shared.kind, size, reading, writing, block, part, there=True, partly=filled)
        flush = [self._link(TaskKind.RECEIVE_STATE, total, state, after, block, part)]
        if back is not None and made is not None:
            flush.append(self._link(TaskKind.RECEIVE_WEIGHTS, high - low, made, back, block, part))
        if self.on_disk:
            flush.append(emitter.store(after, block, range(part, part + 1), partly=(after,)))
        return _Chunk(reads, update, flush)

    def _send_weights(self, block: int, part: int, source: int, target: int) -> Op:
        low, high = self.model.weights_span(block, part)
        return self._link(TaskKind.SEND_WEIGHTS, high - low, source, target, block, part)

    def _link(self, kind: TaskKind, size: int, source: int, target: int, block: int, part: int) -> Op:
        """A chunk over the link."""
        task = partial(self.emitter.link_task, kind, size, source, target, block)
        return lambda: task(part=part, partly=(source, target))
