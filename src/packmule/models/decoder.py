"""The decoder as explicit forward and backward task bodies. No autograd, nothing kept.

Letters: N tokens, H hidden, V vocabulary, C tokens of a loss chunk, M capacity (most tokens) a
buffer was sized for. Buffers may be longer than N; bodies use their first N rows. `weights` and
`grads` map a block's parameter names to tensors of the compute and the gradient dtype; `saved` and
`scratch` are views of the layouts in packmule.shapes.bodies.

`first` means: this is the first contribution to the gradients, so write them, do not add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models import experts, self_attention
from packmule.models.context import Decoder, Tensors, TokenBatch
from packmule.models.feed_forward import half_of
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import input_gradient, linear, weight_gradient
from packmule.spec.tally import Tally

if TYPE_CHECKING:
    from packmule.shapes.layer import LayerShape


def embed_forward(decoder: Decoder, weights: Tensors, batch: TokenBatch, out: Tensor) -> None:
    """out[:N] = weight[ids] * scale, and where positions are learned, + positions. out: c [M, H]."""
    kernels, variant, rows = decoder.kernels, decoder.shape.variant, out[: batch.tokens]
    kernels.embedding(weights["weight"], batch.ids, rows, decoder.embedding_scale)
    if variant.learned_positions:
        kernels.embedding(weights["positions.weight"], batch.positions.long(), rows, add=True)


def embed_backward(decoder: Decoder, dy: Tensor, batch: TokenBatch, grads: Tensors, first: bool) -> None:
    """Gradients of `embed_forward`, in token order. dy: c [M, H].

    A tied model's head has written the gradient of "weight" before, so it is added to.
    """
    kernels, shape, dy = decoder.kernels, decoder.shape, dy[: batch.tokens]
    opening = first and not shape.tied
    kernels.embedding_backward(dy, batch.ids, grads["weight"], opening, decoder.embedding_scale)
    if shape.variant.learned_positions:
        kernels.embedding_backward(dy, batch.positions.long(), grads["positions.weight"], first)


def layer_forward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    out: Tensor,
) -> None:
    """One decoder layer: x + attention, then + feed-forward.

    Args:
        x: c [M, H], the block input; out: c [M, H]. `out` may be `x` unless a backward will
            need `x`.
        saved: layer_saved, written. Where nothing is kept, give it any buffer of that layout.
        scratch: layer_forward_scratch (or layer_backward_scratch, which contains its names).
    """
    n = batch.tokens
    middle = saved["middle"][:n]
    self_attention.forward(decoder, layer, weights, batch, x[:n], saved, scratch, middle)
    half_of(layer).forward(decoder, layer, weights, middle, saved, scratch, out[:n])


def layer_backward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    dy: Tensor,
    dx: Tensor,
    grads: Tensors,
    first: bool,
    recompute: bool,
) -> None:
    """Gradients of `layer_forward`.

    Args:
        x: c [M, H], the block input of the forward.
        saved: layer_saved as the forward left it; with `recompute`, any buffer of that layout:
            the forward runs into it again, with the same bits. Some of it is overwritten by
            gradients: a backward runs once.
        scratch: layer_backward_scratch.
        dy, dx: c [M, H], gradients of the output (read) and the input (written). dx may be
            dy; it may not be x.
        grads: g, by parameter name; empty: the layer is frozen, only dx is wanted.
    """
    n = batch.tokens
    x, dy, dx, middle = x[:n], dy[:n], dx[:n], saved["middle"][:n]
    if recompute:
        self_attention.forward(decoder, layer, weights, batch, x, saved, scratch, middle)
    half_of(layer).backward(decoder, layer, weights, middle, saved, scratch, dy, dx, grads, first, recompute)
    # dx now holds the gradient of the middle of the residual stream.
    self_attention.backward(decoder, layer, weights, batch, x, saved, scratch, dx, dx, grads, first)


def route_forward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    routed: Tensors,
    mixed: Tensor,
    balance: Tensor | None,
) -> None:
    """The first part of a layer with experts: attention, norm and router. Its experts follow.

    Args:
        x, saved, scratch: as in `layer_forward`.
        routed, mixed, balance: as in `experts.open_forward`.
    """
    middle = saved["middle"][: batch.tokens]
    self_attention.forward(decoder, layer, weights, batch, x[: batch.tokens], saved, scratch, middle)
    experts.open_forward(decoder, layer, weights, middle, saved, scratch, routed, mixed, balance)


def route_backward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    routed: Tensors,
    dispatched: Tensors,
    balance: Tensor,
    dy: Tensor,
    dx: Tensor,
    grads: Tensors,
    first: bool,
    recompute: bool,
) -> None:
    """Gradients of `route_forward`, after those of the layer's experts.

    Args:
        routed: as the forward left it, also with `recompute`.
        dispatched: as all `experts.experts_backward` left it.
        balance: s [E], as `experts.balance_gradient` makes it.
        The others are as in `layer_backward`.
    """
    n = batch.tokens
    x, dy, dx, middle = x[:n], dy[:n], dx[:n], saved["middle"][:n]
    if recompute:
        self_attention.forward(decoder, layer, weights, batch, x, saved, scratch, middle)
    experts.close_backward(
        decoder, layer, weights, middle, saved, scratch, routed, dispatched, balance, dy, dx, grads, first,
        recompute,
    )  # fmt: skip
    self_attention.backward(decoder, layer, weights, batch, x, saved, scratch, dx, dx, grads, first)


def head_loss(
    decoder: Decoder,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    scale: float,
    chunk: int,
    dx: Tensor,
    grads: Tensors,
    scratch: Tensors,
    first: bool,
) -> tuple[float, int]:
    """Final norm, logits and cross entropy, forward and backward, `chunk` tokens at a time.

    Args:
        weights, grads: "norm.weight" and "weight" [V, H]; for a tied model the latter are the
            embedding's; an empty `grads`: the head is frozen.
        x: c [M, H]; dx: c [M, H], written, may be x.
        scale: factor of the gradient, 1 / (targets of the global batch). The loss is not scaled.
        scratch: head_scratch(..., chunk, train=True).

    Returns:
        The sum of the loss over the targets, added in float64, and the number of targets.
    """
    kernels, norm, cap = decoder.kernels, decoder.shape.norm, decoder.shape.variant.logit_cap
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, batch.tokens, chunk):
        stop = min(start + chunk, batch.tokens)
        rows, count = slice(start, stop), stop - start
        opening = first and start == 0
        normed, logits, loss = _chunk_logits(decoder, weights, x[rows], scratch)
        if cap is not None:
            capped = scratch["capped"][:count]
            capped.copy_(logits)
        kernels.cross_entropy(logits, batch.targets[rows], scale, loss, True)
        if cap is not None:
            kernels.softcap_backward(logits, capped, 1.0, cap)
        total += loss.sum(dtype=torch.float64)
        weight_gradient(kernels, logits, normed, grads.get("weight"), opening, scratch)
        dnormed = scratch["dnormed"][:count]
        input_gradient(logits, weights["weight"], dnormed, scratch)
        norm_backward(
            kernels, norm, weights, "norm", dnormed, x[rows], scratch, dnormed, grads, None, opening
        )
        dx[rows].copy_(dnormed)
    return float(total), batch.targets_count


def head_evaluate(
    decoder: Decoder,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    chunk: int,
    scratch: Tensors,
    token_bytes: Tensor | None = None,
) -> Tally:
    """The loss of `head_loss`, same bits, without gradients, and the other sums of a Tally.

    Args:
        scratch: head_scratch(train=False).
        token_bytes: int32 [V], bytes of text that each token stands for, where known.
    """
    total, byte_loss = torch.zeros(2, dtype=torch.float64, device=x.device)
    correct = size = 0
    for start in range(0, batch.tokens, chunk):
        rows = slice(start, min(start + chunk, batch.tokens))
        targets = batch.targets[rows]
        _, logits, loss = _chunk_logits(decoder, weights, x[rows], scratch)
        # Ignored targets are negative: never the highest logit's index.
        correct += int((logits.argmax(1) == targets).sum())
        decoder.kernels.cross_entropy(logits, targets, 1.0, loss, False)
        total += loss.sum(dtype=torch.float64)
        if token_bytes is not None:
            sizes = token_bytes[targets.clamp(min=0)] * (targets >= 0)
            size += int(sizes.sum())
            byte_loss += (loss * (sizes > 0)).sum(dtype=torch.float64)
    return Tally(float(total), batch.targets_count, correct, float(byte_loss), size)


def _chunk_logits(
    decoder: Decoder, weights: Tensors, x: Tensor, scratch: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, logits, room for the loss) of x: c [C, H]."""
    count = len(x)
    normed, logits = scratch["normed"][:count], scratch["logits"][:count]
    norm_forward(decoder.kernels, decoder.shape.norm, weights, "norm", x, normed, scratch)
    linear(normed, weights["weight"], logits, scratch)
    cap = decoder.shape.variant.logit_cap
    if cap is not None:
        decoder.kernels.softcap(logits, 1.0, cap)
    return normed, logits, scratch["loss"][:count]
