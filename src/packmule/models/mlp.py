"""The dense feed-forward half of a layer: out = x + down(activation(gate) * up of norm x).

Letters: N tokens, H hidden, F feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from packmule.models.context import Decoder, Tensors
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import input_gradient, linear, weight_gradient
from packmule.shapes.mlp import Mlp

if TYPE_CHECKING:
    from packmule.shapes.layer import LayerShape


def forward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    out: Tensor,
) -> None:
    """As `packmule.models.feed_forward.Half.forward`."""
    act = _until_down(decoder, layer, weights, x, saved, scratch)
    linear(act, weights["down.weight"], out, scratch, x)


def _until_down(
    decoder: Decoder, layer: LayerShape, weights: Tensors, x: Tensor, saved: Tensors, scratch: Tensors
) -> Tensor:
    """All but the last product, whose input [N, F] is returned; scratch "normed" is left holding
    the norm's output."""
    n = len(x)
    normed = scratch["normed"][:n]
    norm_forward(decoder.kernels, layer.norm, weights, "norm2", x, normed, saved)
    for name in ("gate", "up"):
        linear(normed, weights[f"{name}.weight"], saved[name][:n], scratch)
    return _activate(decoder, layer, n, saved, scratch)


def _activate(decoder: Decoder, layer: LayerShape, n: int, saved: Tensors, scratch: Tensors) -> Tensor:
    assert isinstance(layer.feed_forward, Mlp)
    width = layer.feed_forward.width
    act = scratch["act"][: n * width].view(n, width)
    decoder.kernels.swiglu(saved["gate"][:n], saved["up"][:n], act)
    return act


def backward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    dy: Tensor,
    dx: Tensor,
    grads: Tensors,
    first: bool,
    recompute: bool,
) -> None:
    """As `packmule.models.feed_forward.Half.backward`; gate and up are overwritten by their
    gradients."""
    kernels, n = decoder.kernels, len(x)
    normed, gate, up = scratch["normed"][:n], saved["gate"][:n], saved["up"][:n]
    if recompute:
        act = _until_down(decoder, layer, weights, x, saved, scratch)
    else:
        act = _activate(decoder, layer, n, saved, scratch)
        norm_forward(kernels, layer.norm, weights, "norm2", x, normed, saved)
    weight_gradient(kernels, dy, act, grads["down.weight"], first, scratch)
    # act has been used; its place takes its gradient.
    input_gradient(dy, weights["down.weight"], act, scratch)
    kernels.swiglu_backward(act, gate, up, gate, up)
    weight_gradient(kernels, gate, normed, grads["gate.weight"], first, scratch)
    weight_gradient(kernels, up, normed, grads["up.weight"], first, scratch)
    # So has normed.
    input_gradient(gate, weights["gate.weight"], normed, scratch)
    input_gradient(up, weights["up.weight"], normed, scratch, add=True)
    norm_backward(kernels, layer.norm, weights, "norm2", normed, x, saved, dx, grads, dy, first)
