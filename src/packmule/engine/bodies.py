"""Task bodies: what each kind of task does to the buffers it declared. One function per kind.

Bodies of computation run on one thread and may call torch; bodies of transfers (disk, link) run on
threads of their own and must not. Where a device computes, updates and casts run on the `cores` thread
beside it: they call kernels, and of torch what looks at memory only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from packmule.engine import link, stored, updates, vocabulary
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
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import SECOND, BufferKind, TaskKind, Tier
from packmule.models import decode, decoder
from packmule.models import experts as mixture
from packmule.models.views import TORCH_DTYPES
from packmule.shapes import bodies as shapes
from packmule.shapes import experts as expert_shapes
from packmule.shapes.experts import Experts

Body = Callable[[Runtime, Task], None]

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


# Disk


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
    TaskKind.CAST: updates.cast,
    TaskKind.EMBED_FORWARD: embed_forward,
    TaskKind.LAYER_FORWARD: layer_forward,
    TaskKind.HEAD_LOSS: head_loss,
    TaskKind.HEAD_EVALUATE: head_evaluate,
    TaskKind.LAYER_BACKWARD: layer_backward,
    TaskKind.EMBED_BACKWARD: embed_backward,
    TaskKind.NORM: updates.norm,
    TaskKind.CLIP: updates.clip,
    TaskKind.UPDATE: updates.update,
    TaskKind.UPDATE_AHEAD: updates.update_ahead,
    TaskKind.VALIDATE: updates.validate,
    TaskKind.COMMIT: updates.commit,
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
    TaskKind.SNAPSHOT: updates.snapshot,
    TaskKind.PART_SCORE: vocabulary.part_score,
    TaskKind.PART_GRADIENT: vocabulary.part_gradient,
    TaskKind.HEAD_CLOSE: vocabulary.head_close,
    TaskKind.HEAD_TALLY: vocabulary.head_tally,
    TaskKind.SEND_WEIGHTS: link.weights(send=True),
    TaskKind.SEND_GRADIENT: link.gradient(send=True),
    TaskKind.SEND_INPUT: link.whole(BufferKind.INPUT, send=True),
    TaskKind.SEND_ROUTED: link.whole(BufferKind.ROUTED, send=True),
    TaskKind.SEND_STATE: link.state(send=True),
    TaskKind.RECEIVE_GRADIENT: link.gradient(send=False),
    TaskKind.RECEIVE_INPUT: link.whole(BufferKind.INPUT, send=False),
    TaskKind.RECEIVE_ROUTED: link.whole(BufferKind.ROUTED, send=False),
    TaskKind.RECEIVE_STATE: link.state(send=False),
    TaskKind.RECEIVE_WEIGHTS: link.weights(send=False),
}
