"""The dense feed-forward half of a layer: out = x + down(activation(gate) * up of norm x).

Letters: N tokens, H hidden, F feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.context import Decoder, Tensors
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import input_gradient, project, project_gradients
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
    mlp = _mlp(layer)
    act = _until_down(decoder, layer, weights, x, saved, scratch)
    if not layer.post_norms:
        project(weights, "down", mlp.bias, act, out, scratch, x)
        return
    torch.add(x, _normed_down(decoder, layer, weights, act, saved, scratch), out=out)


def _mlp(layer: LayerShape) -> Mlp:
    assert isinstance(layer.feed_forward, Mlp)
    return layer.feed_forward


def _until_down(
    decoder: Decoder, layer: LayerShape, weights: Tensors, x: Tensor, saved: Tensors, scratch: Tensors
) -> Tensor:
    """All but the last product, whose input [N, F] is returned; scratch "normed" is left holding
    the norm's output."""
    mlp, n = _mlp(layer), len(x)
    normed = scratch["normed"][:n]
    norm_forward(decoder.kernels, layer.norm, weights, "norm2", x, normed, saved)
    for name in mlp.inner:
        project(weights, name, mlp.bias, normed, saved[name][:n], scratch)
    return _activate(decoder, layer, n, saved, scratch)


def _activate(decoder: Decoder, layer: LayerShape, n: int, saved: Tensors, scratch: Tensors) -> Tensor:
    mlp = _mlp(layer)
    act = scratch["act"][: n * mlp.width].view(n, mlp.width)
    gate, up = _inner(mlp, saved, n)
    decoder.kernels.activate(gate, up, act, mlp.activation)
    return act


def _inner(mlp: Mlp, saved: Tensors, n: int) -> tuple[Tensor, Tensor | None]:
    """What the activation is of, and what it is multiplied by."""
    first, *second = (saved[name][:n] for name in mlp.inner)
    return first, second[0] if second else None


def _normed_down(
    decoder: Decoder, layer: LayerShape, weights: Tensors, act: Tensor, saved: Tensors, scratch: Tensors
) -> Tensor:
    """The last product, and the norm after it, which is returned in scratch "normed"."""
    n = len(act)
    fed, normed = saved["fed"][:n], scratch["normed"][:n]
    project(weights, "down", _mlp(layer).bias, act, fed, scratch)
    norm_forward(decoder.kernels, layer.norm, weights, "post2", fed, normed, saved)
    return normed


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
    kernels, mlp, n = decoder.kernels, _mlp(layer), len(x)
    normed, added = scratch["normed"][:n], dy
    if recompute:
        act = _until_down(decoder, layer, weights, x, saved, scratch)
        if layer.post_norms:
            _normed_down(decoder, layer, weights, act, saved, scratch)
    else:
        act = _activate(decoder, layer, n, saved, scratch)
    if layer.post_norms:
        added = normed
        norm_backward(
            kernels, layer.norm, weights, "post2", dy, saved["fed"][:n], saved, added, grads, None, first
        )
    project_gradients(kernels, grads, "down", mlp.bias, added, act, first, scratch)
    # act has been used; its place takes its gradient.
    input_gradient(added, weights["down.weight"], act, scratch)
    gate, up = _inner(mlp, saved, n)
    kernels.activate_backward(act, gate, up, gate, up, mlp.activation)
    if layer.post_norms or not recompute:
        norm_forward(kernels, layer.norm, weights, "norm2", x, normed, saved)
    for name in mlp.inner:
        project_gradients(kernels, grads, name, mlp.bias, saved[name][:n], normed, first, scratch)
    # So has normed.
    for name in mlp.inner:
        grad = saved[name][:n]
        input_gradient(grad, weights[f"{name}.weight"], normed, scratch, add=name != mlp.inner[0])
    norm_backward(kernels, layer.norm, weights, "norm2", normed, x, saved, dx, grads, dy, first)
