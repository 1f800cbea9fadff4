"""Task bodies: what each kind of task does to the buffers it declared. One function per kind.

Bodies of computation run on one thread and may call torch; bodies of transfers (disk, link) run on
threads of their own and must not. Where a device computes, updates and casts run on the `cores` thread
beside it: they call kernels, and of torch what looks at memory only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from packmule.engine import stored, vocabulary
from packmule.engine.access import gradients as _gradients
from packmule.engine.access import head_input as _head_input
from packmule.engine.access import input_of as _input
from packmule.engine.access import noise as _noise
from packmule.engine.access import scratch as _scratch
from packmule.engine.access import stream as _stream
from packmule.engine.access import tensor as _tensor
from packmule.engine.access import tokens as _tokens
from packmule.engine.access import weights as _weights
from packmule.engine.program import Task
from packmule.engine.runtime import Ahead, Runtime, StepState
from packmule.errors import RunFailed
from packmule.graph.kinds import SECOND, BufferKind, TaskKind, Tier
from packmule.models import decode, decoder
from packmule.models import experts as mixture
from packmule.models.views import TORCH_DTYPES
from packmule.optim.rule import Update
from packmule.shapes import bodies as shapes
from packmule.shapes import experts as expert_shapes
from packmule.shapes.experts import Experts
from packmule.shapes.layout import ITEMSIZE, Entry
from packmule.shapes.state import factors

Body = Callable[[Runtime, Task], None]

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


# Tensors of a task


def _head_weights(runtime: Runtime, task: Task) -> dict[str, Tensor]:
    shared = runtime.model.blocks[task.block].shared
    own = _weights(runtime, task, task.block)
    return own if shared is None else {**own, "weight": _weights(runtime, task, shared)["weight"]}


def _recomputes(runtime: Runtime, task: Task) -> bool:
    """Whether a backward runs forward again: the first of two overwrites what was saved."""
    return task.part == SECOND or runtime.model.recomputes(task.block)


# Compute


def embed_forward(runtime: Runtime, task: Task) -> None:
    batch, out = runtime.state.batches[task.micro], _input(runtime, task, runtime.model.following(task.block))
    weights = _weights(runtime, task, task.block)
    if runtime.model.cut:
        vocabulary.embed_forward(runtime, task, weights, batch, out)
    else:
        decoder.embed_forward(runtime.decoder, weights, batch, out)


def layer_forward(runtime: Runtime, task: Task) -> None:
    types, tokens = runtime.model.types, _tokens(runtime, task)
    layer = runtime.model.decoder.layer(task.block)
    decoder.layer_forward(
        runtime.decoder,
        layer,
        _weights(runtime, task, task.block),
        runtime.state.batches[task.micro],
        _input(runtime, task, task.block),
        _scratch(runtime, task, BufferKind.SAVED, shapes.layer_saved, layer, tokens, types),
        _scratch(runtime, task, BufferKind.SCRATCH, shapes.layer_forward_scratch, layer, tokens, types),
        _input(runtime, task, runtime.model.following(task.block)),
    )


def layer_backward(runtime: Runtime, task: Task) -> None:
    types, tokens = runtime.model.types, _tokens(runtime, task)
    dy = _stream(runtime, task.get(BufferKind.DY, -1))
    layer = runtime.model.decoder.layer(task.block)
    grads = _gradients(runtime, task, task.block)
    with _noise(runtime, task, grads):
        decoder.layer_backward(
            runtime.decoder,
            layer,
            _weights(runtime, task, task.block),
            runtime.state.batches[task.micro],
            _input(runtime, task, task.block),
            _scratch(runtime, task, BufferKind.SAVED, shapes.layer_saved, layer, tokens, types),
            _scratch(runtime, task, BufferKind.SCRATCH, shapes.layer_backward_scratch, layer, tokens, types),
            dy,
            dy,
            grads,
            first=task.micro == 0,
            recompute=_recomputes(runtime, task),
        )


# Layers with experts


def _experts(runtime: Runtime, task: Task) -> Experts:
    found = runtime.model.decoder.layer(task.block).experts
    if found is None:
        raise RuntimeError("a layer without experts")
    return found


def _shared(runtime: Runtime, task: Task, kind: BufferKind) -> dict[str, Tensor]:
    """A buffer that the blocks of a layer share: ROUTED, MIXED, DISPATCHED."""
    hidden, types, tokens = runtime.model.decoder.hidden, runtime.model.types, _tokens(runtime, task)
    place = task.get(kind, runtime.model.opening(task.block))
    if kind == BufferKind.MIXED:
        return runtime.views(place, runtime.layout(expert_shapes.mixed, hidden, tokens, types))
    make = expert_shapes.routed if kind == BufferKind.ROUTED else expert_shapes.dispatched
    return runtime.views(place, runtime.layout(make, _experts(runtime, task), hidden, tokens, types))


def _balance(runtime: Runtime, task: Task) -> Tensor | None:
    """float64 [2, E], where the step balances its experts."""
    place = task.find(BufferKind.BALANCE, -1)
    if place is None:
        return None
    spec = expert_shapes.balance_spec(_experts(runtime, task))
    return _tensor(runtime, place, spec.numel, spec.dtype).view(spec.shape)


def route_forward(runtime: Runtime, task: Task) -> None:
    types, tokens = runtime.model.types, _tokens(runtime, task)
    layer, balance = runtime.model.decoder.layer(task.block), _balance(runtime, task)
    if balance is not None and task.micro == 0 and task.block == runtime.model.first_routed:
        balance.zero_()
    decoder.route_forward(
        runtime.decoder,
        layer,
        _weights(runtime, task, task.block),
        runtime.state.batches[task.micro],
        _input(runtime, task, task.block),
        _scratch(runtime, task, BufferKind.SAVED, shapes.layer_saved, layer, tokens, types),
        _scratch(runtime, task, BufferKind.SCRATCH, shapes.layer_forward_scratch, layer, tokens, types),
        _shared(runtime, task, BufferKind.ROUTED),
        _shared(runtime, task, BufferKind.MIXED)["mixed"],
        balance,
    )


def route_backward(runtime: Runtime, task: Task) -> None:
    state, types, tokens = runtime.state, runtime.model.types, _tokens(runtime, task)
    layer, experts, balance = (
        runtime.model.decoder.layer(task.block),
        _experts(runtime, task),
        _balance(runtime, task),
    )
    statistic = TORCH_DTYPES[types.statistic]
    even = torch.zeros(experts.count, dtype=statistic, device=runtime.place)
    if balance is not None:
        rows = sum(batch.tokens for batch in state.batches) * runtime.model.routed_layers
        state.balance = mixture.balance_loss(experts, balance, rows)
        even = mixture.balance_gradient(experts, balance, rows, statistic)
    dy = _stream(runtime, task.get(BufferKind.DY, -1))
    grads = _gradients(runtime, task, task.block)
    with _noise(runtime, task, grads):
        decoder.route_backward(
            runtime.decoder,
            layer,
            _weights(runtime, task, task.block),
            state.batches[task.micro],
            _input(runtime, task, task.block),
            _scratch(runtime, task, BufferKind.SAVED, shapes.layer_saved, layer, tokens, types),
            _scratch(runtime, task, BufferKind.SCRATCH, shapes.layer_backward_scratch, layer, tokens, types),
            _shared(runtime, task, BufferKind.ROUTED),
            _shared(runtime, task, BufferKind.DISPATCHED),
            even,
            dy,
            dy,
            grads,
            first=task.micro == 0,
            recompute=_recomputes(runtime, task),
        )


def _experts_saved(runtime: Runtime, task: Task) -> dict[str, Tensor] | None:
    """Of all groups of the layer; None where nothing is kept."""
    place = task.find(BufferKind.SAVED, runtime.model.opening(task.block) + 1)
    if place is None:
        return None
    arguments = (_experts(runtime, task), _tokens(runtime, task), runtime.model.types)
    return runtime.views(place, runtime.layout(expert_shapes.experts_saved, *arguments))


def _experts_scratch(runtime: Runtime, task: Task, backward: bool, kept: bool) -> dict[str, Tensor]:
    arguments = (
        _experts(runtime, task),
        runtime.model.decoder.hidden,
        _tokens(runtime, task),
        runtime.model.types,
    )
    return _scratch(runtime, task, BufferKind.SCRATCH, shapes.experts_scratch, *arguments, backward, kept)


def experts_forward(runtime: Runtime, task: Task) -> None:
    model, batch = runtime.model, runtime.state.batches[task.micro]
    saved, mixed = _experts_saved(runtime, task), _shared(runtime, task, BufferKind.MIXED)["mixed"]
    mixture.experts_forward(
        runtime.near_kernels,
        _experts(runtime, task),
        model.blocks[task.block].experts,
        _weights(runtime, task, task.block),
        batch.tokens,
        _shared(runtime, task, BufferKind.ROUTED),
        saved,
        _experts_scratch(runtime, task, False, saved is not None),
        mixed,
    )
    if model.closes(task.block):
        out = _input(runtime, task, model.following(task.block))
        runtime.near_kernels.cast(out[: batch.tokens], mixed[: batch.tokens])


def experts_backward(runtime: Runtime, task: Task) -> None:
    model, saved = runtime.model, _experts_saved(runtime, task)
    mixture.experts_backward(
        runtime.near_kernels,
        _experts(runtime, task),
        model.blocks[task.block].experts,
        _weights(runtime, task, task.block),
        runtime.state.batches[task.micro].tokens,
        _shared(runtime, task, BufferKind.ROUTED),
        saved,
        _experts_scratch(runtime, task, True, saved is not None),
        _stream(runtime, task.get(BufferKind.DY, -1)),
        _shared(runtime, task, BufferKind.DISPATCHED),
        _gradients(runtime, task, task.block),
        first=task.micro == 0,
        opening=model.closes(task.block),
    )


def head_loss(runtime: Runtime, task: Task) -> None:
    shape, types, tokens = runtime.model.decoder, runtime.model.types, _tokens(runtime, task)
    shared = runtime.model.blocks[task.block].shared
    chunk = min(runtime.model.plan.numerics.loss_chunk, tokens)
    grads = _gradients(runtime, task, task.block)
    if shared is not None and grads:
        grads = {**grads, "weight": _gradients(runtime, task, shared)["weight"]}
    with _noise(runtime, task, grads):
        runtime.state.losses[task.micro] = decoder.head_loss(
            runtime.decoder,
            _head_weights(runtime, task),
            runtime.state.batches[task.micro],
            _input(runtime, task, task.block),
            runtime.state.scale,
            chunk,
            _stream(runtime, task.get(BufferKind.DY, -1)),
            grads,
            _scratch(runtime, task, BufferKind.SCRATCH, shapes.head_scratch, shape, chunk, types, True),
            first=task.micro == 0,
        )


def head_evaluate(runtime: Runtime, task: Task) -> None:
    shape, types, tokens = runtime.model.decoder, runtime.model.types, _tokens(runtime, task)
    chunk = min(runtime.model.plan.numerics.loss_chunk, tokens)
    runtime.state.tallies[task.micro] = decoder.head_evaluate(
        runtime.decoder,
        _head_weights(runtime, task),
        runtime.state.batches[task.micro],
        _input(runtime, task, task.block),
        chunk,
        _scratch(runtime, task, BufferKind.SCRATCH, shapes.head_scratch, shape, chunk, types, False),
        runtime.state.token_bytes,
    )


def embed_backward(runtime: Runtime, task: Task) -> None:
    if runtime.model.cut:
        vocabulary.embed_backward(runtime, task)
        return
    decoder.embed_backward(
        runtime.decoder,
        _stream(runtime, task.get(BufferKind.DY, -1)),
        runtime.state.batches[task.micro],
        _gradients(runtime, task, 0),
        first=task.micro == 0,
    )


# Generation


def _cache(runtime: Runtime, task: Task) -> Tensor:
    types, layer = runtime.model.types, runtime.model.decoder.layer(task.block)
    place = task.get(BufferKind.KV)
    positions = place.bytes // shapes.cache_spec(layer, 1, types).bytes
    spec = shapes.cache_spec(layer, positions, types)
    return _tensor(runtime, place, spec.numel, spec.dtype).view(spec.shape)


def _decode_scratch(runtime: Runtime, task: Task, positions: int) -> dict[str, Tensor]:
    layer, count = runtime.model.decoder.layer(task.block), runtime.state.capacities[0]
    types = runtime.model.types
    return _scratch(runtime, task, BufferKind.SCRATCH, shapes.decode_scratch, layer, count, positions, types)


def layer_decode(runtime: Runtime, task: Task) -> None:
    cache, tokens = _cache(runtime, task), runtime.state.batches[0].tokens
    decode.layer_decode(
        runtime.decoder,
        runtime.model.decoder.layer(task.block),
        _weights(runtime, task, task.block),
        _input(runtime, task, task.block)[:tokens],
        cache,
        runtime.state.position,
        _decode_scratch(runtime, task, cache.shape[2]),
        _input(runtime, task, runtime.model.following(task.block))[:tokens],
    )


def route_decode(runtime: Runtime, task: Task) -> None:
    cache, tokens = _cache(runtime, task), runtime.state.batches[0].tokens
    decode.route_decode(
        runtime.decoder,
        runtime.model.decoder.layer(task.block),
        _weights(runtime, task, task.block),
        _input(runtime, task, task.block)[:tokens],
        cache,
        runtime.state.position,
        _decode_scratch(runtime, task, cache.shape[2]),
        _shared(runtime, task, BufferKind.ROUTED),
        _shared(runtime, task, BufferKind.MIXED)["mixed"],
    )


def head_decode(runtime: Runtime, task: Task) -> None:
    """The head, or a part of it."""
    model, tokens = runtime.model, runtime.state.batches[0].tokens
    ids = model.blocks[task.block].tokens or range(model.decoder.vocab)
    arguments = (model.decoder, len(ids), model.types)
    logits = decode.head_logits(
        runtime.decoder,
        vocabulary.part_weights(runtime, task) if model.cut else _head_weights(runtime, task),
        _head_input(runtime, task)[:tokens],
        _scratch(runtime, task, BufferKind.SCRATCH, shapes.head_decode_scratch, *arguments),
    )
    place = task.get(BufferKind.LOGITS, len(model.blocks) - 1)
    _tensor(runtime, place, model.decoder.vocab, "float32")[ids.start : ids.stop].copy_(logits)


# Gradients and updates


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
    """The rule; checksums of what comes from the disk and goes there are taken while it is in the cache."""
    chunks = stored.moving(runtime, task)
    stored.confirm(runtime, chunks)
    _rule(runtime, task, shared)
    if runtime.model.plan.placement.state == "disk":
        stored.vouch(runtime, task.block, chunks)


def _rule(runtime: Runtime, task: Task, shared: Update) -> None:
    model, block = runtime.model, runtime.model.blocks[task.block]
    plane_bytes = model.plane_bytes[task.block]
    start, size = (0, plane_bytes) if task.part < 0 else model.chunks(task.block)[task.part]
    resident = task.find(BufferKind.STATE)
    state = resident or task.get(BufferKind.STATE_CHUNK)
    stride, base = (plane_bytes, start) if resident else (size, 0)
    factored = _factors(runtime, task)
    whole = task.find(BufferKind.GRADIENT)
    gradient = whole or task.get(BufferKind.GRADIENT_CHUNK)
    gradient_base = start if whole else 0
    target = task.find(BufferKind.WEIGHTS)
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
            weight = _tensor(runtime, target, count, types.compute, at)
        values = _tensor(runtime, gradient, count, types.gradient, gradient_base + inside)
        runtime.rule.apply(runtime.kernels, shared, role, planes, values, weight)


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


# Disk


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


def _transfer(kind: BufferKind, write: bool) -> Body:
    def body(runtime: Runtime, task: Task) -> None:
        near, far = task.find(kind), task.get(kind, tier=Tier.DISK)
        if near is None:
            # A gradient kept whole in RAM, of which this is a chunk.
            whole = task.get(BufferKind.GRADIENT)
            near = replace(whole, offset=whole.offset + runtime.model.chunks(task.block)[task.part][0])
        view = runtime.arena.view(near.offset, far.bytes)
        if write:
            runtime.disk.write(runtime.work, view, far.offset)
        else:
            runtime.disk.read_into(runtime.work, view, far.offset)

    return body


def _over_link(kind: BufferKind, send: bool) -> Body:
    def body(runtime: Runtime, task: Task) -> None:
        far = task.get(kind, tier=Tier.DEVICE)
        near = task.find(kind, tier=Tier.RAM) or task.get(BufferKind.STATE)  # whose masters come first
        view = runtime.arena.view(near.offset, far.bytes)
        if send:
            runtime.device.send(view, far.offset)
        else:
            runtime.device.receive(view, far.offset)

    return body


BODIES: dict[TaskKind, Body] = {
    TaskKind.READ_STATE: stored.read_state,
    TaskKind.READ_VERIFIED: stored.read_verified,
    TaskKind.READ_WEIGHTS: _transfer(BufferKind.WEIGHTS, write=False),
    TaskKind.READ_GRADIENT: _transfer(BufferKind.GRADIENT_CHUNK, write=False),
    TaskKind.READ_INPUT: _transfer(BufferKind.INPUT, write=False),
    TaskKind.WRITE_STATE: stored.write_state,
    TaskKind.WRITE_WEIGHTS: _transfer(BufferKind.WEIGHTS, write=True),
    TaskKind.WRITE_GRADIENT: _transfer(BufferKind.GRADIENT_CHUNK, write=True),
    TaskKind.WRITE_INPUT: _transfer(BufferKind.INPUT, write=True),
    TaskKind.CAST: cast,
    TaskKind.EMBED_FORWARD: embed_forward,
    TaskKind.LAYER_FORWARD: layer_forward,
    TaskKind.HEAD_LOSS: head_loss,
    TaskKind.HEAD_EVALUATE: head_evaluate,
    TaskKind.LAYER_BACKWARD: layer_backward,
    TaskKind.EMBED_BACKWARD: embed_backward,
    TaskKind.NORM: norm,
    TaskKind.CLIP: clip,
    TaskKind.UPDATE: update,
    TaskKind.UPDATE_AHEAD: update_ahead,
    TaskKind.VALIDATE: validate,
    TaskKind.COMMIT: commit,
    TaskKind.EMBED_DECODE: embed_forward,
    TaskKind.LAYER_DECODE: layer_decode,
    TaskKind.HEAD_DECODE: head_decode,
    TaskKind.ROUTE_FORWARD: route_forward,
    TaskKind.ROUTE_BACKWARD: route_backward,
    TaskKind.ROUTE_DECODE: route_decode,
    TaskKind.EXPERTS_FORWARD: experts_forward,
    TaskKind.EXPERTS_BACKWARD: experts_backward,
    TaskKind.READ_ROUTED: _transfer(BufferKind.ROUTED, write=False),
    TaskKind.WRITE_ROUTED: _transfer(BufferKind.ROUTED, write=True),
    TaskKind.WRITE_SNAPSHOT: stored.write_snapshot,
    TaskKind.SNAPSHOT: snapshot,
    TaskKind.PART_SCORE: vocabulary.part_score,
    TaskKind.PART_GRADIENT: vocabulary.part_gradient,
    TaskKind.HEAD_CLOSE: vocabulary.head_close,
    TaskKind.HEAD_TALLY: vocabulary.head_tally,
    TaskKind.SEND_WEIGHTS: _over_link(BufferKind.WEIGHTS, send=True),
    TaskKind.SEND_GRADIENT: _over_link(BufferKind.GRADIENT, send=True),
    TaskKind.SEND_INPUT: _over_link(BufferKind.INPUT, send=True),
    TaskKind.SEND_ROUTED: _over_link(BufferKind.ROUTED, send=True),
    TaskKind.RECEIVE_GRADIENT: _over_link(BufferKind.GRADIENT, send=False),
    TaskKind.RECEIVE_INPUT: _over_link(BufferKind.INPUT, send=False),
    TaskKind.RECEIVE_ROUTED: _over_link(BufferKind.ROUTED, send=False),
}
