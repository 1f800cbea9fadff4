"""Gradients of a step: their buffers, and the tasks that move them between device, RAM and disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from packmule.graph.emit import Emitter, Op, Piece, Stream
from packmule.graph.kinds import BufferKind, TaskKind, Tier


@dataclass(frozen=True)
class Gradient:
    """Where the complete gradient of a block is; on disk in chunks, if neither is said.

    Attributes:
        ram: its buffer in RAM.
        near: its buffer on a device.
    """

    ram: int | None = None
    near: int | None = None


class Gradients:
    """Keeps the gradients' buffers. `again` means those of the second backward of a step that has two."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter, self.model, self.plan = emitter, emitter.model, emitter.model.plan
        self._in_ram: dict[tuple[int, bool], int] = {}
        self._near: dict[tuple[int, bool], int] = {}
        self._halves: dict[tuple[int, bool], int] = {}

    def near(self, block: int, again: bool = False) -> int:
        """A block's gradient, where backward adds to it.

        Args:
            again: that of the second backward of a step that has two.
        """
        if self.emitter.near == Tier.RAM:
            return self.whole(block, again)
        if (block, again) not in self._near:
            buffer = self.emitter.work(BufferKind.GRADIENT, self.model.plane_bytes[block], block)
            self._near[block, again] = buffer
        return self._near[block, again]

    def whole(self, block: int, again: bool = False) -> int:
        """A block's gradient in RAM, complete; `again` as in `near`."""
        if (block, again) not in self._in_ram:
            if self.emitter.has_resident(BufferKind.GRADIENT, Tier.RAM, block):
                buffer = self.emitter.resident(BufferKind.GRADIENT, Tier.RAM, block)
            else:
                buffer = self.emitter.ram(BufferKind.GRADIENT, self.model.plane_bytes[block], block)
            self._in_ram[block, again] = buffer
        return self._in_ram[block, again]

    def held(self, block: int) -> Gradient:
        """Where a block's gradient waits for an update that comes later."""
        return Gradient(None if self.plan.placement.gradients == "disk" else self.whole(block))

    def at_head(self, part: int, again: bool) -> int:
        """Where the head adds the gradient of a part: of a tied one it may go to disk before the
        embedding's own is there."""
        if not self.model.halved(part):
            return self.near(part, again)
        if (part, again) not in self._halves:
            size = self.model.plane_bytes[part]
            self._halves[part, again] = self.emitter.work(BufferKind.GRADIENT, size, part)
        return self._halves[part, again]

    def arrive(self, block: int, again: bool = False) -> tuple[Stream, Gradient]:
        """What brings a complete gradient to RAM, and where it is then."""
        whole = self.whole(block, again)
        if self.emitter.near == Tier.RAM:
            return [], Gradient(whole)
        near = self.near(block, again)
        return [self.receive(block, near, whole)], Gradient(whole, near)

    def receive(self, block: int, source: int, target: int) -> Piece:
        """What brings all of it from the device to RAM."""
        size = self.model.plane_bytes[block]
        return Piece(
            None, partial(self.emitter.link_task, TaskKind.RECEIVE_GRADIENT, size, source, target, block)
        )

    def store(self, block: int, source: int) -> Stream:
        """A whole gradient to disk, chunk by chunk."""

        def write(size: int, stored: int, part: int) -> Op:
            return lambda: self.emitter.disk_task(
                TaskKind.WRITE_GRADIENT, size, [source], [stored], block, part=part
            )

        return [Piece(None, write(*chunk)) for chunk in self._chunks(block)]

    def read(self, block: int, again: bool) -> Stream:
        """What the head left on disk, to where the embedding adds its own."""
        near, emitter = self.near(block, again), self.emitter
        size, sent = self.model.plane_bytes[block], emitter.near == Tier.DEVICE
        target = emitter.ram(BufferKind.GRADIENT, size, block) if sent else near

        def read(size: int, stored: int, part: int) -> Op:
            return lambda: self.emitter.disk_task(
                TaskKind.READ_GRADIENT, size, [stored], [target], block, part=part
            )

        stream = [Piece(read(*chunk), None) for chunk in self._chunks(block)]
        if sent:
            send = partial(emitter.link_task, TaskKind.SEND_GRADIENT, size, target, near, block)
            stream.append(Piece(None, None, send))
        return stream

    def _chunks(self, block: int) -> list[tuple[int, int, int]]:
        """(bytes, place on disk, number) of each."""
        return [
            (size, self.emitter.resident(BufferKind.GRADIENT_CHUNK, Tier.DISK, block, part), part)
            for part, (_, size) in enumerate(self.model.chunks(block))
        ]
