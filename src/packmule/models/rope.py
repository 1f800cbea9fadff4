"""Tables of rotary position embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from packmule.models.views import TORCH_DTYPES
from packmule.shapes.rope import Rope


class Tables(NamedTuple):
    """cos and sin of every position and pair of dimensions, [positions, dims / 2] each."""

    cos: Tensor
    sin: Tensor


def rope_tables(rope: Rope, positions: int, dtype_name: str) -> Tables:
    """cos and sin of position * theta^(-2i/dims) (Su et al. 2021).

    Computed in `dtype_name` throughout, in the order transformers uses, so float32 tables
    agree with it to the last bit.
    """
    dtype = TORCH_DTYPES[dtype_name]
    exponent = torch.arange(0, rope.dims, 2, dtype=torch.int64).to(dtype) / rope.dims
    frequency = 1.0 / (rope.theta**exponent)
    angle = torch.arange(positions, dtype=torch.int64).to(dtype)[:, None] * frequency[None, :]
    return Tables(angle.cos(), angle.sin())
