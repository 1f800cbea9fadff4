"""Spills: block inputs that are elsewhere between a block's forward and its backward."""

from __future__ import annotations

from functools import partial

from packmule.graph.emit import Emitter, Piece, Stream
from packmule.graph.experts import ExpertTasks
from packmule.graph.kinds import BufferKind, TaskKind, Tier
from packmule.graph.visits import ahead

SEND = {BufferKind.INPUT: TaskKind.SEND_INPUT, BufferKind.ROUTED: TaskKind.SEND_ROUTED}
RECEIVE = {BufferKind.INPUT: TaskKind.RECEIVE_INPUT, BufferKind.ROUTED: TaskKind.RECEIVE_ROUTED}


class Spills:
    """Takes inputs away and brings them back, as the plan's placement says.

    Args:
        inputs: buffers of blocks' inputs by (block, micro-batch); they leave it and come back.
        lowest: the first block that backward reaches.
    """

    def __init__(
        self, emitter: Emitter, experts: ExpertTasks, inputs: dict[tuple[int, int], int], lowest: int
    ) -> None:
        self.emitter, self.experts, self.inputs, self.lowest = emitter, experts, inputs, lowest
        self.model, self.plan = emitter.model, emitter.model.plan
        self.head = len(self.model.blocks) - 1
        self.spilled: dict[tuple[int, int, int], int] = {}

    def away(self, block: int, micro: int) -> Stream:
        """What follows a block's forward."""
        return [Piece(None, partial(self._spill, kind, block, micro)) for kind in self._kinds(block)]

    def back(self, block: int, micro: int) -> Stream:
        """What comes before its backward."""
        return [self._unspilled(kind, block, micro) for kind in self._kinds(block)]

    def _kinds(self, block: int) -> list[BufferKind]:
        """What goes elsewhere between the forward and the backward of a block (to disk; from a device
        also to RAM): a layer's input; after its last group of experts, where its tokens went. What the
        last blocks need stays: their backward's fetch would come before the store, which lags a visit."""
        near = 2 * block > 2 * self.head - ahead(self.plan) - 2
        kind = self.model.blocks[block].kind
        unused = block < self.lowest or kind not in ("layer", "experts")
        if self.plan.placement.inputs == self.emitter.near.name.lower() or near or unused:
            return []
        if kind == "layer":
            return [BufferKind.INPUT]
        return [BufferKind.ROUTED] if self.model.closes(block) else []

    def _spillable(self, kind: BufferKind, block: int) -> tuple[dict[tuple[int, int], int], int]:
        """The buffers of a kind, and the block whose number they bear."""
        if kind == BufferKind.INPUT:
            return self.inputs, block
        return self.experts.routed, self.model.opening(block)

    def _spill(self, kind: BufferKind, block: int, micro: int) -> None:
        emitter = self.emitter
        buffers, owner = self._spillable(kind, block)
        source = buffers.pop((owner, micro))
        size = self._spilled_bytes(kind, owner, micro)
        if emitter.near == Tier.DEVICE:
            received = emitter.ram(kind, size, owner, micro)
            emitter.link_task(RECEIVE[kind], size, source, received, owner, micro)
            source = received
        if self.plan.placement.inputs == "ram":
            self.spilled[kind, owner, micro] = source
            return
        stored = emitter.builder.buffer(kind, Tier.DISK, size, block=owner, micro=micro)
        task = TaskKind.WRITE_INPUT if kind == BufferKind.INPUT else TaskKind.WRITE_ROUTED
        emitter.disk_task(task, size, [source], [stored], owner, micro)
        self.spilled[kind, owner, micro] = stored

    def _unspilled(self, kind: BufferKind, block: int, micro: int) -> Piece:
        """What brings it back."""
        emitter = self.emitter
        buffers, owner = self._spillable(kind, block)
        size = self._spilled_bytes(kind, owner, micro)
        in_ram: list[int] = []

        def read() -> None:
            in_ram.append(emitter.ram(kind, size, owner, micro))
            if emitter.near == Tier.RAM:
                buffers[owner, micro] = in_ram[0]
            task = TaskKind.READ_INPUT if kind == BufferKind.INPUT else TaskKind.READ_ROUTED
            emitter.disk_task(task, size, [self.spilled[kind, owner, micro]], in_ram, owner, micro)

        def send() -> None:
            target = buffers[owner, micro] = emitter.work(kind, size, owner, micro)
            source = in_ram[0] if in_ram else self.spilled[kind, owner, micro]
            emitter.link_task(SEND[kind], size, source, target, owner, micro)

        on_disk, on_device = self.plan.placement.inputs == "disk", emitter.near == Tier.DEVICE
        return Piece(read if on_disk else None, None, send if on_device else None)

    def _spilled_bytes(self, kind: BufferKind, owner: int, micro: int) -> int:
        tokens = self.plan.numerics.micro_tokens[micro]
        if kind == BufferKind.INPUT:
            return self.model.input_bytes(tokens)
        return self.experts.routed_bytes(owner, tokens)
