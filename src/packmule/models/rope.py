"""Tables of rotary position embeddings."""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from packmule.models.views import TORCH_DTYPES
from packmule.shapes.rope import Linear, Llama3, LongRope, Rope, Yarn


class Tables(NamedTuple):
    """cos and sin of every position and pair of dimensions, [rows, dims / 2] each.

    Row p is position p; where `long` is not 0, row long + p is that position of a long document.
    """

    cos: Tensor
    sin: Tensor
    long: int = 0


class Turn(NamedTuple):
    """How the tokens of some documents turn: rows of cos and sin, int32 [N]."""

    cos: Tensor
    sin: Tensor
    rows: Tensor


def rope_tables(rope: Rope, positions: int, dtype_name: str) -> Tables:
    """cos and sin of position * theta^(-2i/dims) (Su et al. 2021), scaled as the rope says.

    Computed in `dtype_name` throughout, in the order transformers uses, so float32 tables
    agree with it to the last bit.
    """
    dtype = TORCH_DTYPES[dtype_name]
    at = torch.arange(positions, dtype=torch.int64).to(dtype)[:, None]
    scaling = rope.scaling
    angles = [at * frequencies(rope, dtype)[None, :]]
    if isinstance(scaling, LongRope) and positions > scaling.original:
        angles.append(at * frequencies(rope, dtype, long=True)[None, :])
    angle = torch.cat(angles)
    cos, sin = angle.cos(), angle.sin()
    if isinstance(scaling, Yarn | LongRope):
        cos, sin = cos * scaling.attention, sin * scaling.attention
    return Tables(cos, sin, positions if len(angles) > 1 else 0)


def frequencies(rope: Rope, dtype: torch.dtype, long: bool = False) -> Tensor:
    """Radians per position of each pair of dimensions, [dims / 2].

    Args:
        long: those of documents longer than a LongRope's original positions.
    """
    exponent = torch.arange(0, rope.dims, 2, dtype=torch.int64).to(dtype) / rope.dims
    power, scaling = rope.theta**exponent, rope.scaling
    match scaling:
        case Linear():
            return 1.0 / power / scaling.factor
        case Llama3():
            return _llama3(1.0 / power, scaling)
        case Yarn():
            return _yarn(rope, scaling, power)
        case LongRope():
            factors = torch.tensor(scaling.long if long else scaling.short, dtype=dtype)
            return 1.0 / (factors * power)
    return 1.0 / power


def _llama3(frequency: Tensor, scaling: Llama3) -> Tensor:
    length = 2 * pi / frequency
    share = (scaling.original / length - scaling.low) / (scaling.high - scaling.low)
    mixed = (1 - share) * frequency / scaling.factor + share * frequency
    long = length > scaling.original / scaling.low
    scaled = torch.where(long, frequency / scaling.factor, frequency)
    between = ~(length < scaling.original / scaling.high) & ~long
    return torch.where(between, mixed, scaled)


def _yarn(rope: Rope, scaling: Yarn, power: Tensor) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension that turns so often within the original positions."""
        return rope.dims * log(scaling.original / (turns * 2 * pi)) / (2 * log(rope.theta))

    low, high = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = (torch.arange(rope.dims // 2, dtype=power.dtype) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * power) * (1 - kept) + 1.0 / power * kept
