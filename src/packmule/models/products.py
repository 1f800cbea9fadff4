"""The matrix products of a linear map y = x Wᵀ (+ b), in the dtype this machine multiplies fastest.

Where the product dtype is the compute dtype they are torch's own. Where a CPU multiplies bfloat16
more slowly than float32 (AVX-512 without AMX may do so at half the rate), operands are widened, some
rows at a time so that they stay in cache, and results are rounded once. A product of two bfloat16
numbers is exact in float32: the two ways differ in the order of additions, and in that a widened
weight gradient is added up in float32 without a rounding in between.

Letters: N tokens, I inputs, O outputs. `scratch` holds `shapes.bodies.product_scratch` (nothing
where nothing is widened) and, where products are narrower than gradients, "wgrad".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.shapes.bodies import PRODUCT_ROWS, WEIGHT_ROWS

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels

Scratch = Mapping[str, Tensor]


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: Scratch,
    base: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """out = (base +) (bias +) x Wᵀ. x: c [N, I]; weight: c [O, I]; base, out: c [N, O]; bias: c [O]."""
    if "wide_weight" not in scratch:
        if base is not None and bias is not None:
            base = torch.add(base, bias, out=out)
        start = bias if base is None else base
        if start is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(start, x, weight.t(), out=out)
        return
    for part in _slabs(len(weight), WEIGHT_ROWS):
        wide_weight = _widen(weight[part], scratch["wide_weight"])
        for rows in _slabs(len(x), PRODUCT_ROWS):
            wide_x = _widen(x[rows], scratch["wide_x"])
            wide_y = _view(scratch["wide_y"], *out[rows, part].shape)
            starts = [] if bias is None else [bias[part]]
            if base is not None:
                starts.insert(0, base[rows, part])
            if starts:
                wide_y.copy_(starts[0])
                for more in starts[1:]:
                    wide_y.add_(more)
                wide_y.addmm_(wide_x, wide_weight.t())
            else:
                torch.mm(wide_x, wide_weight.t(), out=wide_y)
            out[rows, part].copy_(wide_y)


def project(
    weights: Scratch,
    name: str,
    bias: bool,
    x: Tensor,
    out: Tensor,
    scratch: Scratch,
    base: Tensor | None = None,
) -> None:
    """`linear` by the name of its weight and, where it has one, its bias."""
    linear(x, weights[f"{name}.weight"], out, scratch, base, weights[f"{name}.bias"] if bias else None)


def project_gradients(
    kernels: Kernels,
    grads: Scratch,
    name: str,
    bias: bool,
    dy: Tensor,
    x: Tensor,
    first: bool,
    scratch: Scratch,
) -> None:
    """Gradients of the weight and bias of `project`, unless `grads` is empty. Shapes as in
    `weight_gradient`."""
    weight_gradient(kernels, dy, x, grads.get(f"{name}.weight"), first, scratch)
    if bias and grads:
        kernels.column_sums(dy, grads[f"{name}.bias"], first)


def input_gradient(dy: Tensor, weight: Tensor, out: Tensor, scratch: Scratch, add: bool = False) -> None:
    """out (+)= dy W. dy: c [N, O]; weight: c [O, I]; out: c [N, I]."""
    if "wide_weight" not in scratch:
        if add:
            torch.addmm(out, dy, weight, out=out)
        else:
            torch.mm(dy, weight, out=out)
        return
    parts = list(_slabs(len(weight), WEIGHT_ROWS))
    for rows in _slabs(len(dy), PRODUCT_ROWS):
        wide_x = _view(scratch["wide_x"], *out[rows].shape)
        if add:
            wide_x.copy_(out[rows])
        for part in parts:
            if len(parts) > 1 or rows.start == 0:
                wide_weight = _widen(weight[part], scratch["wide_weight"])
            wide_dy = _widen(dy[rows, part], scratch["wide_y"])
            if add or part.start:
                wide_x.addmm_(wide_dy, wide_weight)
            else:
                torch.mm(wide_dy, wide_weight, out=wide_x)
        out[rows].copy_(wide_x)


def sum_input_gradients(
    kernels: Kernels, dy: Tensor, weight: Tensor, total: Tensor, first: bool, scratch: Scratch
) -> None:
    """total (+)= dy W, where some of the outputs add to what others left. dy: c [N, O]; weight: c [O, I];
    total: s [N, I], written where `first`. Products that are narrower go through scratch["dnormed"]
    c [N, I]."""
    if "wide_weight" in scratch:
        for part in _slabs(len(weight), WEIGHT_ROWS):
            wide_weight = _widen(weight[part], scratch["wide_weight"])
            for rows in _slabs(len(dy), PRODUCT_ROWS):
                wide_dy = _widen(dy[rows, part], scratch["wide_y"])
                _add_product(wide_dy.t(), wide_weight, total[rows], first and part.start == 0)
    elif total.dtype == dy.dtype:
        _add_product(dy.t(), weight, total, first)
    else:
        narrow = scratch["dnormed"][: len(dy)]
        torch.mm(dy, weight, out=narrow)
        kernels.accumulate(total, narrow, first)


def weight_gradient(
    kernels: Kernels, dy: Tensor, x: Tensor, grad: Tensor | None, first: bool, scratch: Scratch
) -> None:
    """grad (+)= dyᵀ x. dy: c [N, O]; x: c [N, I]; grad: g [O, I], written where `first`; None: the
    weight is frozen."""
    if grad is None:
        return
    if "wide_weight" in scratch:
        for part in _slabs(len(grad), WEIGHT_ROWS):
            for rows in _slabs(len(x), PRODUCT_ROWS):
                wide_dy = _widen(dy[rows, part], scratch["wide_y"])
                wide_x = _widen(x[rows], scratch["wide_x"])
                _add_product(wide_dy, wide_x, grad[part], first and rows.start == 0)
    elif grad.dtype == x.dtype:
        _add_product(dy, x, grad, first)
    else:
        for part in _slabs(len(grad), WEIGHT_ROWS):
            product = _view(scratch["wgrad"], *grad[part].shape)
            torch.mm(dy[:, part].t(), x, out=product)
            kernels.accumulate(grad[part], product, first)


def _add_product(dy: Tensor, x: Tensor, grad: Tensor, first: bool) -> None:
    if first:
        torch.mm(dy.t(), x, out=grad)
    else:
        torch.addmm(grad, dy.t(), x, out=grad)


def _slabs(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def _widen(narrow: Tensor, room: Tensor) -> Tensor:
    wide = _view(room, *narrow.shape)
    wide.copy_(narrow)
    return wide


def _view(room: Tensor, rows: int, columns: int) -> Tensor:
    return room[: rows * columns].view(rows, columns)
