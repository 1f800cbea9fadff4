"""Norms as pairs of forward and backward, by the shape's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.shapes.layer import Norm

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels

Tensors = Mapping[str, Tensor]


def norm_forward(
    kernels: Kernels, norm: Norm, weights: Tensors, name: str, x: Tensor, out: Tensor, saved: Tensors
) -> None:
    """out = the norm called `name` of x. x, out: c [N, H]; its statistics go to `saved`."""
    weight, rstd = weights[f"{name}.weight"], saved[f"{name}.rstd"][: len(x)]
    if norm.kind == "rms":
        kernels.rmsnorm(x, weight, norm.eps, out, rstd, norm.offset)
    else:
        mean = saved[f"{name}.mean"][: len(x)]
        kernels.layernorm(x, weight, weights[f"{name}.bias"], norm.eps, out, mean, rstd)


def norm_backward(
    kernels: Kernels,
    norm: Norm,
    weights: Tensors,
    name: str,
    dy: Tensor,
    x: Tensor,
    saved: Tensors,
    dx: Tensor,
    grads: Tensors,
    residual: Tensor | None,
    first: bool,
) -> None:
    """dx = (residual +) the gradient of x; parameters' gradients go to `grads`.

    Args:
        dy, x, residual: c [N, H]; dx may be dy or residual.
        saved: what `norm_forward` left.
        grads: by parameter name; empty: the parameters are frozen.
        first: write the parameters' gradients, do not add.
    """
    weight, rstd = weights[f"{name}.weight"], saved[f"{name}.rstd"][: len(x)]
    dweight = grads.get(f"{name}.weight")
    if dweight is None:  # frozen: a few numbers that nobody reads
        dweight, first = torch.empty_like(weight, dtype=rstd.dtype), True
    if norm.kind == "rms":
        kernels.rmsnorm_backward(dy, x, weight, rstd, dx, dweight, residual, first, norm.offset)
    else:
        mean = saved[f"{name}.mean"][: len(x)]
        if grads:
            kernels.column_sums(dy, grads[f"{name}.bias"], first)  # before dx takes dy's place
        kernels.layernorm_backward(dy, x, weight, mean, rstd, dx, dweight, residual, first)
