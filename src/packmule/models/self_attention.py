"""The attention half of a layer: out = x + o(attention(norm x)). Forward, backward, projections.

Letters: N tokens, H hidden, A heads, K key/value heads, D head dimension, M capacity of a buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from packmule.models.attention import attention_backward, attention_forward
from packmule.models.context import Decoder, Tensors, TokenBatch
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import input_gradient, linear, weight_gradient

if TYPE_CHECKING:
    from packmule.shapes.layer import LayerShape

PROJECTIONS = ("q", "k", "v")


def project(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    positions: Tensor,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
) -> None:
    """Queries, keys and values of x, queries and keys turned by their positions, into `saved`.

    Args:
        positions: int32 [N]. x: c [N, H].
        scratch: "normed" is left holding the norm's output.
    """
    kernels, n = decoder.kernels, len(x)
    normed = scratch["normed"][:n]
    norm_forward(kernels, layer.norm, weights, "norm1", x, normed, saved)
    for name in PROJECTIONS:
        linear(normed, weights[f"{name}.weight"], saved[name][:n], scratch)
    cos, sin = decoder.tables[layer.rope]
    for name in ("q", "k"):
        kernels.rope(saved[name][:n], cos, sin, positions, layer.head_dim, False)


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
    project(decoder, layer, weights, batch.positions, x, saved, scratch)
    q, k, v, attention = (saved[name][:n] for name in (*PROJECTIONS, "attention"))
    lse = saved["lse"][: layer.heads * n]
    attention_forward(decoder.kernels, layer, batch.groups, q, k, v, attention, lse, scratch)
    linear(attention, weights["o.weight"], out, scratch, x)


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
    normed = scratch["normed"][:n]
    q, k, v, attention = (saved[name][:n] for name in (*PROJECTIONS, "attention"))
    weight_gradient(kernels, dy, attention, grads["o.weight"], first, scratch)
    dattention = scratch["act"][: n * layer.query_width].view(n, layer.query_width)
    input_gradient(dy, weights["o.weight"], dattention, scratch)
    lse = saved["lse"][: layer.heads * n]
    attention_backward(kernels, layer, batch.groups, q, k, v, attention, lse, dattention, q, k, v, scratch)
    cos, sin = decoder.tables[layer.rope]
    for grad in (q, k):
        kernels.rope(grad, cos, sin, batch.positions, layer.head_dim, True)
    norm_forward(kernels, layer.norm, weights, "norm1", x, normed, saved)
    for name in PROJECTIONS:
        weight_gradient(kernels, saved[name][:n], normed, grads[f"{name}.weight"], first, scratch)
    # normed has been used; its place takes its gradient.
    for name in PROJECTIONS:
        input_gradient(saved[name][:n], weights[f"{name}.weight"], normed, scratch, add=name != "q")
    norm_backward(kernels, layer.norm, weights, "norm1", normed, x, saved, dx, grads, dy, first)
