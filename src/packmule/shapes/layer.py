"""One decoder layer as numbers: an attention half and a feed-forward half, each with its norms.

`Variant` holds what a family does alike in every layer, `LayerKind` what differs from layer to
layer; `LayerShape` is one layer with everything that its bodies need.
"""

from __future__ import annotations

from dataclasses import dataclass

from packmule.shapes.blocks import Parameter
from packmule.shapes.experts import Experts
from packmule.shapes.layout import TensorSpec
from packmule.shapes.mlp import Activation, FeedForward
from packmule.shapes.rope import Rope


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    eps: float

    def parameters(self, name: str, width: int) -> tuple[Parameter, ...]:
        """What a norm called `name` owns."""
        return (Parameter(f"{name}.weight", (width,), "norm"),)

    def saved(self, name: str, rows: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Its statistics, which its backward needs."""
        return (TensorSpec(f"{name}.rstd", (rows,), dtype),)


@dataclass(frozen=True)
class Variant:
    """What sets a family apart from Llama, alike in every layer."""

    activation: Activation = "silu"


PLAIN = Variant()
"""Llama."""


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer.

    Attributes:
        feed_forward: takes the place of the dense half, or None.
    """

    feed_forward: FeedForward | None = None


@dataclass(frozen=True)
class LayerShape:
    """One layer: x + attention, then + feed-forward.

    Attributes:
        scale: multiplies query times key.
        rope: how queries and keys turn.
        feed_forward: the second half.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: Norm
    rope: Rope
    scale: float
    feed_forward: FeedForward

    @property
    def query_width(self) -> int:
        """Columns of the queries, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Columns of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def experts(self) -> Experts | None:
        """The feed-forward half, where it is a mixture of experts."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    def expert_parameters(self, experts: range) -> tuple[Parameter, ...]:
        """What a group of experts owns, in the order it lies in its block."""
        if self.experts is None:
            raise ValueError("a layer without experts")
        return self.experts.group_parameters(self.hidden, 1.0, experts)

    def parameters(self) -> tuple[Parameter, ...]:
        """Everything the layer owns, but for its experts, in the order it lies in a block."""
        h, q, kv = self.hidden, self.query_width, self.key_width
        return (
            *self.norm.parameters("norm1", h),
            Parameter("q.weight", (q, h), "matrix"),
            Parameter("k.weight", (kv, h), "matrix"),
            Parameter("v.weight", (kv, h), "matrix"),
            Parameter("o.weight", (h, q), "matrix"),
            *self.norm.parameters("norm2", h),
            *self.feed_forward.parameters(h, 1.0),
        )
