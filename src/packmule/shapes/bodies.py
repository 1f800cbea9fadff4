"""What each task body keeps and borrows: saved tensors, scratch, workspace, FLOPs.

Letters as in docs/design.md. `c` is the compute dtype; `s` is the dtype of statistics
(float32, or float64 in fp64 mode). The bodies in packmule.models take their views from these
very lists, so declared bytes are used bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from packmule.shapes.layout import ITEMSIZE, TensorSpec
from packmule.shapes.model import ModelShape


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one precision: masters and moments, gradients, compute, statistics."""

    master: str
    gradient: str
    compute: str
    statistic: str


DTYPES = {
    "fp32": Dtypes("float32", "float32", "float32", "float32"),
    "bf16-mixed": Dtypes("float32", "float32", "bfloat16", "float32"),
    "fp64": Dtypes("float64", "float64", "float64", "float64"),
}

HEAD_SLAB_ROWS = 8192
"""Vocabulary rows whose weight gradient is computed at once, so its temporary stays small."""


def layer_saved(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What a layer's backward needs from its forward, besides the block input."""
    c, s, n = types.compute, types.statistic, tokens
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        TensorSpec("rstd1", (n,), s),
        TensorSpec("q", (n, q), c),
        TensorSpec("k", (n, kv), c),
        TensorSpec("v", (n, kv), c),
        TensorSpec("attention", (n, q), c),
        TensorSpec("lse", (shape.heads * n,), s),
        TensorSpec("middle", (n, shape.hidden), c),
        TensorSpec("rstd2", (n,), s),
        TensorSpec("gate", (n, shape.ffn), c),
        TensorSpec("up", (n, shape.ffn), c),
    )


def layer_forward_scratch(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer's forward (saved tensors come on top when they are not kept)."""
    c = types.compute
    return (
        TensorSpec("normed", (tokens, shape.hidden), c),
        TensorSpec("act", (tokens, shape.ffn), c),
    )


def layer_backward_scratch(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer's backward."""
    c, n = types.compute, tokens
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    largest = max(p.shape[0] * p.shape[1] for p in shape.blocks()[1].parameters if len(p.shape) == 2)
    low = types.compute != types.gradient
    return (
        TensorSpec("normed", (n, shape.hidden), c),
        TensorSpec("act", (n, shape.ffn), c),
        TensorSpec("dnormed", (n, shape.hidden), c),
        TensorSpec("dmiddle", (n, shape.hidden), c),
        TensorSpec("dattention", (n, q), c),
        TensorSpec("dq", (n, q), c),
        TensorSpec("dk", (n, kv), c),
        TensorSpec("dv", (n, kv), c),
        *((TensorSpec("wgrad", (largest,), c),) if low else ()),
    )


def head_scratch(shape: ModelShape, chunk: int, types: Dtypes, train: bool) -> tuple[TensorSpec, ...]:
    """Temporaries of the head for one loss chunk of `chunk` tokens."""
    c, s = types.compute, types.statistic
    low = types.compute != types.gradient
    forward = (
        TensorSpec("normed", (chunk, shape.hidden), c),
        TensorSpec("rstd", (chunk,), s),
        TensorSpec("logits", (chunk, shape.vocab), c),
        TensorSpec("loss", (chunk,), s),
    )
    if not train:
        return forward
    slab = min(HEAD_SLAB_ROWS, shape.vocab)
    return (
        *forward,
        TensorSpec("dnormed", (chunk, shape.hidden), c),
        *((TensorSpec("wgrad", (slab * shape.hidden,), c),) if low else ()),
    )


def input_spec(shape: ModelShape, tokens: int, types: Dtypes) -> TensorSpec:
    """The residual stream between blocks."""
    return TensorSpec("x", (tokens, shape.hidden), types.compute)


def layer_workspace(shape: ModelShape, tokens: int, types: Dtypes) -> int:
    """Most bytes torch holds outside the arena during a layer's body: attention's outputs
    and gradients, and its buffers per thread. Tokens is the longest run of equal documents."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    c, s = ITEMSIZE[types.compute], ITEMSIZE[types.statistic]
    return tokens * ((2 * q + 2 * kv) * c + 2 * shape.heads * s) + (8 << 20)


def layer_flops(shape: ModelShape, tokens: int, mean_length: float) -> tuple[float, float]:
    """(matmul, attention) FLOPs of one layer's forward; backward takes twice the first and
    2.5 times the second. `mean_length` is tokens per document, weighted by tokens."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * q + 2 * kv) + 3 * shape.hidden * shape.ffn
    return 2.0 * tokens * weights, 2.0 * tokens * mean_length * q


def head_flops(shape: ModelShape, tokens: int) -> float:
    """FLOPs of the logits; their backward takes twice as many."""
    return 2.0 * tokens * shape.vocab * shape.hidden
