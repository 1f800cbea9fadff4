"""Bodies of the link's transfers between RAM and a device: whole buffers, and chunks of a block on their
way to an update on the device and back. They run on threads of their own and call no torch."""

from __future__ import annotations

from collections.abc import Callable

from packmule.engine.program import Range, Task
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import BufferKind, Tier

Body = Callable[[Runtime, Task], None]


def whole(kind: BufferKind, send: bool) -> Body:
    """All of a buffer that there is in both places."""

    def body(runtime: Runtime, task: Task) -> None:
        far = task.get(kind, tier=Tier.DEVICE)
        near = task.find(kind, tier=Tier.RAM) or task.get(BufferKind.STATE)  # whose masters come first
        _move(runtime, near.offset, far.offset, far.bytes, send)

    return body


def gradient(send: bool) -> Body:
    """A block's gradient, or one chunk of it."""

    def place(runtime: Runtime, task: Task) -> tuple[int, int, int]:
        start, size = runtime.model.chunks(task.block)[task.part]
        near, far = (
            _part(task, tier, BufferKind.GRADIENT, BufferKind.GRADIENT_CHUNK, start)
            for tier in (Tier.RAM, Tier.DEVICE)
        )
        return near, far, size

    return _whole_or_part(BufferKind.GRADIENT, place, send)


def weights(send: bool) -> Body:
    """A block's compute weights, or what one chunk of its masters has become."""

    def place(runtime: Runtime, task: Task) -> tuple[int, int, int]:
        low, high = runtime.model.weights_span(task.block, task.part)
        near = task.find(BufferKind.WEIGHTS, tier=Tier.RAM) or task.get(BufferKind.STATE, tier=Tier.RAM)
        far = _part(task, Tier.DEVICE, BufferKind.WEIGHTS, BufferKind.WEIGHTS_CHUNK, low)
        return near.offset + low, far, high - low

    return _whole_or_part(BufferKind.WEIGHTS, place, send)


def state(send: bool) -> Body:
    """The same element range of every plane, one after the other on the device."""

    def body(runtime: Runtime, task: Task) -> None:
        model = runtime.model
        (start, size), planes = model.chunks(task.block)[task.part], len(model.planes)
        far = task.get(BufferKind.STATE_CHUNK, tier=Tier.DEVICE).offset
        resident = task.find(BufferKind.STATE, tier=Tier.RAM)
        if resident is None:
            near = task.get(BufferKind.STATE_CHUNK, tier=Tier.RAM).offset
            return _move(runtime, near, far, planes * size, send)
        for plane in range(planes):
            if not send:  # it has changed there
                runtime.sums.pop((task.block, runtime.store.layout.index(task.block, plane, task.part)), None)
            near = resident.offset + plane * model.plane_bytes[task.block] + start
            _move(runtime, near, far + plane * size, size, send)

    return body


def _whole_or_part(
    kind: BufferKind, place: Callable[[Runtime, Task], tuple[int, int, int]], send: bool
) -> Body:
    """All of a buffer, or the part of it that a task names.

    Args:
        place: of that part: where in RAM, where on the device, bytes.
    """
    every = whole(kind, send)

    def body(runtime: Runtime, task: Task) -> None:
        if task.part < 0:
            every(runtime, task)
        else:
            _move(runtime, *place(runtime, task), send)

    return body


def _part(task: Task, tier: Tier, kind: BufferKind, chunk: BufferKind, start: int) -> int:
    """Where a chunk is: in the buffer of all of it, or in one of its own."""
    found: Range | None = task.find(kind, tier=tier)
    return task.get(chunk, tier=tier).offset if found is None else found.offset + start


def _move(runtime: Runtime, near: int, far: int, size: int, send: bool) -> None:
    view = runtime.arena.view(near, size)
    if send:
        runtime.device.send(view, far)
    else:
        runtime.device.receive(view, far)
