"""The Llama family as explicit forward and backward task bodies. No autograd, nothing kept.

Letters: N tokens, H hidden, A heads, K key/value heads, D head dimension, F feed-forward, V
vocabulary, C tokens of a loss chunk, M capacity (most tokens) a buffer was sized for.
Buffers may be longer than N; bodies use their first N rows. `weights` and `grads` map a block's
parameter names to tensors of the compute and the gradient dtype; `saved` and `scratch` are
views of the layouts in packmule.shapes.bodies.

`first` means: this is the first contribution to the gradients, so write them, do not add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.attention import Run, attention_backward, attention_forward, runs
from packmule.models.products import input_gradient, linear, weight_gradient
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.bodies import Dtypes

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels
    from packmule.shapes.model import ModelShape
    from packmule.spec.batch import Batch

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch on the torch side.

    Attributes:
        ids, targets: int64 [N]; positions: int32 [N]; lengths: as in spec.batch.Batch.
        groups: neighboring documents of equal length.
        targets_count: targets that carry loss.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    groups: tuple[Run, ...]
    targets_count: int

    @classmethod
    def from_batch(cls, batch: Batch) -> TokenBatch:
        """Share the arrays' memory."""
        from packmule.spec.batch import IGNORED

        return cls(
            torch.from_numpy(batch.ids),
            torch.from_numpy(batch.targets),
            torch.from_numpy(batch.positions),
            batch.lengths,
            runs(batch.lengths),
            int((batch.targets != IGNORED).sum()),
        )

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.ids)


@dataclass(frozen=True)
class Decoder:
    """What every body of a run shares, and nothing that changes.

    Attributes:
        cos, sin: RoPE tables, statistics dtype [positions, D / 2].
    """

    kernels: Kernels
    shape: ModelShape
    types: Dtypes
    cos: Tensor
    sin: Tensor

    @classmethod
    def create(cls, kernels: Kernels, shape: ModelShape, types: Dtypes, positions: int) -> Decoder:
        """Make the tables for positions 0..positions-1."""
        cos, sin = rope_tables(shape, positions, types.statistic)
        return cls(kernels, shape, types, cos, sin)


def rope_tables(shape: ModelShape, positions: int, dtype_name: str) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/D), [positions, D / 2] each (Su et al. 2021).

    Computed in `dtype_name` throughout, in the order transformers uses, so float32 tables
    agree with it to the last bit.
    """
    dtype = TORCH_DTYPES[dtype_name]
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).to(dtype) / shape.head_dim
    frequency = 1.0 / (shape.rope_theta**exponent)
    angle = torch.arange(positions, dtype=torch.int64).to(dtype)[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def embed_forward(decoder: Decoder, weights: Tensors, batch: TokenBatch, out: Tensor) -> None:
    """out[:N] = weight[ids]. out: c [M, H]."""
    decoder.kernels.embedding(weights["weight"], batch.ids, out[: batch.tokens])


def embed_backward(decoder: Decoder, dy: Tensor, batch: TokenBatch, grad: Tensor, first: bool) -> None:
    """grad[ids[i]] (+)= dy[i], in token order. dy: c [M, H]; grad: g [V, H].

    For a tied model the head has written `grad` before: `first` is False.
    """
    decoder.kernels.embedding_backward(dy[: batch.tokens], batch.ids, grad, first)


def layer_forward(
    decoder: Decoder,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    out: Tensor,
) -> None:
    """One pre-norm decoder layer: x + attention, then + SwiGLU.

    Args:
        x: c [M, H], the block input; out: c [M, H]. `out` may be `x` unless a backward will
            need `x`.
        saved: layer_saved, written. Where nothing is kept, give it any buffer of that layout.
        scratch: layer_forward_scratch (or layer_backward_scratch, which contains its names).
    """
    n = batch.tokens
    act = _layer_until_down(decoder, weights, batch, x[:n], saved, scratch)
    linear(act, weights["down.weight"], out[:n], scratch, saved["middle"][:n])


def _layer_until_down(
    decoder: Decoder, weights: Tensors, batch: TokenBatch, x: Tensor, saved: Tensors, scratch: Tensors
) -> Tensor:
    """All of a layer's forward but its last product, whose input [N, F] is returned; scratch
    "normed" is left holding the second norm's output."""
    kernels, shape, n = decoder.kernels, decoder.shape, batch.tokens
    normed = scratch["normed"][:n]
    q, k, v, attention, middle, gate, up = (
        saved[name][:n] for name in ("q", "k", "v", "attention", "middle", "gate", "up")
    )
    kernels.rmsnorm(x, weights["norm1.weight"], shape.norm_eps, normed, saved["rstd1"][:n])
    for name, target in (("q", q), ("k", k), ("v", v)):
        linear(normed, weights[f"{name}.weight"], target, scratch)
    for target in (q, k):
        kernels.rope(target, decoder.cos, decoder.sin, batch.positions, shape.head_dim, False)
    lse = saved["lse"][: shape.heads * n]
    attention_forward(kernels, shape, batch.groups, q, k, v, attention, lse, scratch)
    linear(attention, weights["o.weight"], middle, scratch, x)
    kernels.rmsnorm(middle, weights["norm2.weight"], shape.norm_eps, normed, saved["rstd2"][:n])
    linear(normed, weights["gate.weight"], gate, scratch)
    linear(normed, weights["up.weight"], up, scratch)
    act = scratch["act"][: n * shape.ffn].view(n, shape.ffn)
    kernels.swiglu(gate, up, act)
    return act


def layer_backward(
    decoder: Decoder,
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
            the forward runs into it again, with the same bits. Its q, k, v, gate and up are
            overwritten by their gradients: a backward runs once.
        scratch: layer_backward_scratch.
        dy, dx: c [M, H], gradients of the output (read) and the input (written). dx may be
            dy; it may not be x.
        grads: g, by parameter name.
    """
    kernels, shape, n = decoder.kernels, decoder.shape, batch.tokens
    x, dy, dx = x[:n], dy[:n], dx[:n]
    normed = scratch["normed"][:n]
    q, k, v, attention, middle, gate, up = (
        saved[name][:n] for name in ("q", "k", "v", "attention", "middle", "gate", "up")
    )
    if recompute:
        act = _layer_until_down(decoder, weights, batch, x, saved, scratch)
    else:
        act = scratch["act"][: n * shape.ffn].view(n, shape.ffn)
        kernels.swiglu(gate, up, act)
        kernels.rmsnorm(middle, weights["norm2.weight"], shape.norm_eps, normed, saved["rstd2"][:n])

    weight_gradient(kernels, dy, act, grads["down.weight"], first, scratch)
    # act has been used; its place takes its gradient.
    input_gradient(dy, weights["down.weight"], act, scratch)
    kernels.swiglu_backward(act, gate, up, gate, up)
    weight_gradient(kernels, gate, normed, grads["gate.weight"], first, scratch)
    weight_gradient(kernels, up, normed, grads["up.weight"], first, scratch)
    # So has normed.
    input_gradient(gate, weights["gate.weight"], normed, scratch)
    input_gradient(up, weights["up.weight"], normed, scratch, add=True)
    kernels.rmsnorm_backward(
        normed, middle, weights["norm2.weight"], saved["rstd2"][:n], dx, grads["norm2.weight"], dy, first
    )

    # dx now holds the gradient of the middle of the residual stream.
    weight_gradient(kernels, dx, attention, grads["o.weight"], first, scratch)
    width = shape.heads * shape.head_dim
    dattention = scratch["act"][: n * width].view(n, width)
    input_gradient(dx, weights["o.weight"], dattention, scratch)
    lse = saved["lse"][: shape.heads * n]
    attention_backward(kernels, shape, batch.groups, q, k, v, attention, lse, dattention, q, k, v, scratch)
    for grad in (q, k):
        kernels.rope(grad, decoder.cos, decoder.sin, batch.positions, shape.head_dim, True)
    kernels.rmsnorm(x, weights["norm1.weight"], shape.norm_eps, normed, saved["rstd1"][:n])
    for name, grad in (("q", q), ("k", k), ("v", v)):
        weight_gradient(kernels, grad, normed, grads[f"{name}.weight"], first, scratch)
    input_gradient(q, weights["q.weight"], normed, scratch)
    input_gradient(k, weights["k.weight"], normed, scratch, add=True)
    input_gradient(v, weights["v.weight"], normed, scratch, add=True)
    kernels.rmsnorm_backward(
        normed, x, weights["norm1.weight"], saved["rstd1"][:n], dx, grads["norm1.weight"], dx, first
    )


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
            embedding's.
        x: c [M, H]; dx: c [M, H], written, may be x.
        scale: factor of the gradient, 1 / (targets of the global batch). The loss is not scaled.
        scratch: head_scratch(..., chunk, train=True).

    Returns:
        The sum of the loss over the targets, added in float64, and the number of targets.
    """
    kernels = decoder.kernels
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, batch.tokens, chunk):
        stop = min(start + chunk, batch.tokens)
        rows, count = slice(start, stop), stop - start
        opening = first and start == 0
        normed, logits, loss = _chunk_logits(decoder, weights, x[rows], scratch)
        kernels.cross_entropy(logits, batch.targets[rows], scale, loss, True)
        total += loss.sum(dtype=torch.float64)
        weight_gradient(kernels, logits, normed, grads["weight"], opening, scratch)
        dnormed = scratch["dnormed"][:count]
        input_gradient(logits, weights["weight"], dnormed, scratch)
        kernels.rmsnorm_backward(
            dnormed, x[rows], weights["norm.weight"], scratch["rstd"][:count], dnormed,
            grads["norm.weight"], None, opening,
        )  # fmt: skip
        dx[rows].copy_(dnormed)
    return float(total), batch.targets_count


def head_evaluate(
    decoder: Decoder, weights: Tensors, batch: TokenBatch, x: Tensor, chunk: int, scratch: Tensors
) -> tuple[float, int]:
    """The loss of `head_loss`, same bits, without gradients. scratch: head_scratch(train=False)."""
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, batch.tokens, chunk):
        rows = slice(start, min(start + chunk, batch.tokens))
        _, logits, loss = _chunk_logits(decoder, weights, x[rows], scratch)
        decoder.kernels.cross_entropy(logits, batch.targets[rows], 1.0, loss, False)
        total += loss.sum(dtype=torch.float64)
    return float(total), batch.targets_count


def _chunk_logits(
    decoder: Decoder, weights: Tensors, x: Tensor, scratch: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, logits, room for the loss) of x: c [C, H]."""
    count = len(x)
    normed, logits = scratch["normed"][:count], scratch["logits"][:count]
    decoder.kernels.rmsnorm(
        x, weights["norm.weight"], decoder.shape.norm_eps, normed, scratch["rstd"][:count]
    )
    linear(normed, weights["weight"], logits, scratch)
    return normed, logits, scratch["loss"][:count]
