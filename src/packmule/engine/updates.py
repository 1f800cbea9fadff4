"""Bodies of gradients' norms, updates, casts, and of what makes a step durable or takes it back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from packmule.engine import stored
from packmule.engine.access import gradients as _gradients
from packmule.engine.access import tensor as _tensor
from packmule.engine.program import Task
from packmule.engine.runtime import Ahead, Runtime, StepState
from packmule.errors import RunFailed
from packmule.graph.kinds import BufferKind, Tier
from packmule.optim.rule import Update
from packmule.shapes.layout import ITEMSIZE, Entry
from packmule.shapes.state import factors

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


def norm(runtime: Runtime, task: Task) -> None:
    """The block's sums of squares go to its buffer, float64 in parameter order, and are reported."""
    views, entries = _gradients(runtime, task, task.block), runtime.plane_layouts[task.block].entries
    found = _norms(runtime, task, task.block)
    for index, entry in enumerate(entries):
        found[index] = runtime.near_kernels.sum_squares(views[entry.name])
    runtime.state.norms[task.block] = found.tolist()
    small = {p.name for p in runtime.model.blocks[task.block].parameters if p.role == "norm"}
    squares = (value for entry, value in zip(entries, found.tolist(), strict=True) if entry.name in small)
    runtime.state.norm_weights[task.block] = sum(squares, 0.0)


def clip(runtime: Runtime, task: Task) -> None:
    """The factor goes to its buffer: float64, first 8 bytes."""
    limit = runtime.model.plan.numerics.clip
    blocks = [b.index for b in runtime.model.blocks if task.find(BufferKind.NORMS, b.index) is not None]
    norms = {block: _norms(runtime, task, block).tolist() for block in blocks}
    total = math.sqrt(StepState(norms=norms).square)
    factor = 1.0 if limit is None else min(1.0, limit / (total + CLIP_EPS))
    _tensor(runtime, task.get(BufferKind.SCALE, -1), 1, "float64").fill_(factor)


def _norms(runtime: Runtime, task: Task, block: int) -> Tensor:
    count = len(runtime.plane_layouts[block].entries)
    return _tensor(runtime, task.get(BufferKind.NORMS, block), count, "float64")


def _segments(entries: tuple[Entry, ...], start: int, size: int) -> Iterator[tuple[Entry, int, int]]:
    """(entry, first byte within it, bytes) of the tensors that a byte range of a plane meets."""
    for entry in entries:
        low, high = max(entry.offset, start), min(entry.offset + entry.bytes, start + size)
        if low < high:
            yield entry, low - entry.offset, high - low


def update(runtime: Runtime, task: Task) -> None:
    """The rule on a whole block (part -1) or on one chunk of each plane."""
    shared = runtime.state.update
    if shared is None:
        raise RuntimeError("an update without a step")
    scale = task.find(BufferKind.SCALE, -1)
    if scale is not None:
        shared = replace(shared, factor=float(_tensor(runtime, scale, 1, "float64")))
    _apply(runtime, task, shared)


def update_ahead(runtime: Runtime, task: Task) -> None:
    """`update` of the step under way, before its clip factor is known."""
    _apply(runtime, task, _ahead(runtime).update)


def _ahead(runtime: Runtime) -> Ahead:
    if runtime.state.ahead is None:
        raise RuntimeError("a speculating graph without a step of its own")
    return runtime.state.ahead


def _apply(runtime: Runtime, task: Task, shared: Update) -> None:
    """The rule; checksums of what comes from the disk and goes there are taken while it is in the cache, of a
    whole block chunk by chunk. On a device there are none to take."""
    model, part = runtime.model, task.part
    if task.find(BufferKind.STATE_CHUNK, tier=Tier.DEVICE) is not None:
        _rule(runtime, task, shared, part)
        return
    chunks = stored.moving(runtime, task)
    summed = model.plan.placement.state == "disk" or runtime.state.stores
    if part < 0 and summed and not model.whole_updates:
        count = len(model.chunks(task.block))
        for part in range(count):
            _rule(runtime, task, shared, part)
            stored.vouch(runtime, task.block, chunks[part::count])  # of every plane
        return
    stored.confirm(runtime, chunks)
    _rule(runtime, task, shared, part)
    (stored.vouch if summed else stored.forget)(runtime, task.block, chunks)


def _rule(runtime: Runtime, task: Task, shared: Update, part: int) -> None:
    """The rule on one chunk of each plane, or (-1) on all of them."""
    model, block = runtime.model, runtime.model.blocks[task.block]
    plane_bytes = model.plane_bytes[task.block]
    start, size = (0, plane_bytes) if part < 0 else model.chunks(task.block)[part]
    resident = task.find(BufferKind.STATE)
    state = resident or task.get(BufferKind.STATE_CHUNK)
    stride, base = (plane_bytes, start) if resident else (size, 0)
    factored = _factors(runtime, task)
    whole = task.find(BufferKind.GRADIENT)
    gradient = whole or task.get(BufferKind.GRADIENT_CHUNK)
    gradient_base = start if whole else 0
    target, weights_base = task.find(BufferKind.WEIGHTS), 0
    if target is None:
        target = task.find(BufferKind.WEIGHTS_CHUNK)
        weights_base = 0 if target is None else model.weights_span(task.block, part)[0]
    kernels = runtime.near_kernels if state.tier == Tier.DEVICE else runtime.kernels
    types = model.types
    item = ITEMSIZE[types.master]
    for entry, skip, length in _segments(runtime.plane_layouts[task.block].entries, start, size):
        inside = entry.offset + skip - start
        count = length // item
        planes = [
            _tensor(runtime, state, count, types.master, plane * stride + base + inside)
            for plane in range(1 if factored else len(model.planes))
        ]
        planes += factored.get(entry.name, [])
        if shared.age == 1:
            for plane in planes[1:]:
                plane.zero_()
        role = next(p.role for p in block.parameters if p.name == entry.name)
        weight = None
        if target is not None:
            at = (
                runtime.weight_layouts[task.block][entry.name].offset + skip // item * ITEMSIZE[types.compute]
            )
            weight = _tensor(runtime, target, count, types.compute, at - weights_base)
        values = _tensor(runtime, gradient, count, types.gradient, gradient_base + inside)
        runtime.rule.apply(kernels, shared, role, planes, values, weight)


def _factors(runtime: Runtime, task: Task) -> dict[str, list[Tensor]]:
    """By parameter, what stands for its second moment; empty where the rule has none in factors."""
    layout = runtime.factor_layouts[task.block]
    if layout is None:
        return {}
    views = runtime.views(task.get(BufferKind.STATE), layout, runtime.model.plane_bytes[task.block])
    masters = runtime.plane_layouts[task.block].entries
    return {e.name: [views[f.name] for f in factors(e.name, e.shape, e.dtype)] for e in masters}


def cast(runtime: Runtime, task: Task) -> None:
    """Masters to compute weights: a whole resident block, or one chunk."""
    model = runtime.model
    start, size = (0, model.plane_bytes[task.block]) if task.part < 0 else model.chunks(task.block)[task.part]
    resident = task.find(BufferKind.STATE)
    source = resident or task.find(BufferKind.MASTER_CHUNK) or task.get(BufferKind.STATE_CHUNK)
    base = start if resident else 0
    if task.find(BufferKind.MASTER_CHUNK):
        stored.confirm(runtime, stored.moving(runtime, task))
    target, types = task.get(BufferKind.WEIGHTS), model.types
    item = ITEMSIZE[types.master]
    for entry, skip, length in _segments(runtime.plane_layouts[task.block].entries, start, size):
        count = length // item
        at = runtime.weight_layouts[task.block][entry.name].offset + skip // item * ITEMSIZE[types.compute]
        master = _tensor(runtime, source, count, types.master, base + entry.offset + skip - start)
        runtime.kernels.cast(_tensor(runtime, target, count, types.compute, at), master)


def commit(runtime: Runtime, task: Task) -> None:
    """Replace HEAD; never with numbers that are not finite."""
    state = runtime.state
    if state.progress is None:
        raise RuntimeError("a commit without progress")
    if not runtime.model.plan.commits_late:
        check_finite(state.losses, state.square)  # else it was checked when the step ended
    runtime.writable.commit(state.progress)


def validate(runtime: Runtime, task: Task) -> None:
    """The clip factor is known. One: the updates made ahead are those of the step, which is committed.
    Else the state is that of the last commit again, and the next step applies the gradients."""
    check_finite(runtime.state.losses, runtime.state.square)
    factor = float(_tensor(runtime, task.get(BufferKind.SCALE, -1), 1, "float64"))
    if factor == 1.0:
        runtime.writable.commit(_ahead(runtime).progress)
        runtime.state.validated = True
    else:
        runtime.writable.revert()


def snapshot(runtime: Runtime, task: Task) -> None:
    """The commit has been made: so is the snapshot of it."""
    runtime.end_snapshot()


def check_finite(losses: dict[int, tuple[float, int]], square: float) -> None:
    """Raise RunFailed if a loss or the gradient norm is not finite."""
    if all(math.isfinite(total) for total, _ in losses.values()) and math.isfinite(square):
        return
    raise RunFailed(
        "The loss or its gradient is not finite (NaN or infinity); the last commit is from before.",
        "lower the learning rate, clip with --max-grad-norm 1.0, or look at the data of this step",
    )
