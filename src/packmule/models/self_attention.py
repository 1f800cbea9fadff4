"""The attention half of a layer: out = x + o(attention(norm x)). Forward, backward, projections.

Letters: N tokens, H hidden, A heads, K key/value heads, D head dimension, M capacity of a buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.attention import attention_backward, attention_forward
from packmule.models.context import Decoder, Tensors, TokenBatch
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import input_gradient, project, project_gradients
from packmule.models.rope import Turn

if TYPE_CHECKING:
    from packmule.shapes.layer import LayerShape

PROJECTIONS = ("q", "k", "v")
TURNED = ("q", "k")


def queries_keys_values(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    turn: Turn | None,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
) -> None:
    """Queries, keys and values of x, queries and keys normed and turned as the layer says, into `saved`.

    Args:
        x: c [N, H].
        saved: attention_saved, of which all but "attention", "lse" and what follows them is written.
        scratch: "normed" is left holding the norm's output.
    """
    kernels, n = decoder.kernels, len(x)
    normed = scratch["normed"][:n]
    norm_forward(kernels, layer.norm, weights, "norm1", x, normed, saved)
    for name in PROJECTIONS:
        place = f"{name}_raw" if layer.qk_norm and name in TURNED else name
        project(weights, name, layer.qkv_bias, normed, saved[place][:n], scratch)
    for name in TURNED:
        if layer.qk_norm:
            raw, out = (_heads(layer, saved[place][:n]) for place in (f"{name}_raw", name))
            norm_forward(kernels, layer.norm, weights, f"{name}_norm", raw, out, saved)
        if turn is not None:
            kernels.rope(saved[name][:n], turn.cos, turn.sin, turn.rows, layer.head_dim, False)


def _heads(layer: LayerShape, x: Tensor) -> Tensor:
    """Every head of every token as a row."""
    return x.view(-1, layer.head_dim)


def add_output(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    out: Tensor,
) -> None:
    """out = x + o(attention), with the norm between them where the layer has one.

    Args:
        x, out: c [N, H], not the same.
        saved: "attention" is read, what a norm leaves is written.
    """
    n = len(x)
    attention = saved["attention"][:n]
    if not layer.post_norms:
        project(weights, "o", layer.o_bias, attention, out, scratch, x)
        return
    mixed, normed = saved["mixed"][:n], scratch["normed"][:n]
    project(weights, "o", layer.o_bias, attention, mixed, scratch)
    norm_forward(decoder.kernels, layer.norm, weights, "post1", mixed, normed, saved)
    torch.add(x, normed, out=out)


def forward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    out: Tensor,
) -> None:
    """out = x + o(attention(norm x)).

    Args:
        x, out: c [N, H], not the same.
        saved: attention_saved, written.
        scratch: layer_forward_scratch or layer_backward_scratch.
    """
    n = batch.tokens
    turn = decoder.turn(layer, batch.positions, batch.lengths)
    queries_keys_values(decoder, layer, weights, turn, x, saved, scratch)
    q, k, v, attention = (saved[name][:n] for name in (*PROJECTIONS, "attention"))
    lse = saved["lse"][: layer.heads * n]
    attention_forward(decoder.kernels, layer, batch.groups, q, k, v, attention, lse, scratch)
    add_output(decoder, layer, weights, x, saved, scratch, out)


def backward(
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
) -> None:
    """Gradients of `forward`.

    Args:
        saved: as the forward left it. Its q, k and v are overwritten by their gradients.
        scratch: layer_backward_scratch.
        dy, dx: c [N, H]; dx may be dy; it may not be x.
    """
    kernels, n = decoder.kernels, batch.tokens
    normed, added = scratch["normed"][:n], dy
    q, k, v, attention = (saved[name][:n] for name in (*PROJECTIONS, "attention"))
    if layer.post_norms:
        added = normed
        norm_backward(
            kernels, layer.norm, weights, "post1", dy, saved["mixed"][:n], saved, added, grads, None, first
        )
    project_gradients(kernels, grads, "o", layer.o_bias, added, attention, first, scratch)
    dattention = scratch["act"][: n * layer.query_width].view(n, layer.query_width)
    input_gradient(added, weights["o.weight"], dattention, scratch)
    lse = saved["lse"][: layer.heads * n]
    attention_backward(kernels, layer, batch.groups, q, k, v, attention, lse, dattention, q, k, v, scratch)
    turn = decoder.turn(layer, batch.positions, batch.lengths)
    for name in TURNED:
        if turn is not None:
            kernels.rope(saved[name][:n], turn.cos, turn.sin, turn.rows, layer.head_dim, True)
        if layer.qk_norm:
            raw, grad = (_heads(layer, saved[place][:n]) for place in (f"{name}_raw", name))
            norm_backward(
                kernels, layer.norm, weights, f"{name}_norm", grad, raw, saved, grad, grads, None, first
            )
    norm_forward(kernels, layer.norm, weights, "norm1", x, normed, saved)
    for name in PROJECTIONS:
        project_gradients(kernels, grads, name, layer.qkv_bias, saved[name][:n], normed, first, scratch)
    # normed has been used; its place takes its gradient.
    for name in PROJECTIONS:
        input_gradient(saved[name][:n], weights[f"{name}.weight"], normed, scratch, add=name != "q")
    norm_backward(kernels, layer.norm, weights, "norm1", normed, x, saved, dx, grads, dy, first)
