"""One decoder layer as numbers: an attention half and a feed-forward half, each with its norms.

`Variant` holds what a family does alike in every layer, `LayerKind` what differs from layer to
layer; `LayerShape` is one layer with everything that its bodies need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packmule.shapes.blocks import Parameter
from packmule.shapes.experts import Experts
from packmule.shapes.layout import TensorSpec
from packmule.shapes.mlp import Activation, FeedForward, linear_parameters
from packmule.shapes.rope import Rope

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    Attributes:
        kind: "rms" (Zhang and Sennrich 2019, arXiv:1910.07467), or "layer" with mean and bias (Ba
            et al. 2016, arXiv:1607.06450).
        offset: added to the weight of an "rms" norm; Gemma stores weight - 1.
    """

    eps: float
    kind: NormKind = "rms"
    offset: float = 0.0

    def parameters(self, name: str, width: int) -> tuple[Parameter, ...]:
        """What a norm called `name` owns."""
        weight = Parameter(f"{name}.weight", (width,), "norm", 1.0 - self.offset)
        if self.kind == "rms":
            return (weight,)
        return (weight, Parameter(f"{name}.bias", (width,), "bias", 0.0))

    def saved(self, name: str, rows: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Its statistics, which its backward needs."""
        names = ("rstd",) if self.kind == "rms" else ("mean", "rstd")
        return tuple(TensorSpec(f"{name}.{statistic}", (rows,), dtype) for statistic in names)


@dataclass(frozen=True)
class Variant:
    """What sets a family apart from Llama, alike in every layer.

    Attributes:
        gated: the feed-forward half multiplies its activation by a second product.
        norm: kind of every norm; norm_offset: its offset.
        post_norms: a norm after each half as well, before it is added to the residual stream.
        qk_norm: queries and keys of each head are normed before they turn.
        qkv_bias, o_bias, mlp_bias: which products have biases.
        attention_cap, logit_cap: bounds of attention's scores and of the logits, smooth.
        embedding_scale: multiplies the embedding, rounded to its dtype.
        learned_positions: positions are embedded too, and nothing turns.
        residual_start: `Parameter.start` of the matrices that are added to the residual stream.
    """

    activation: Activation = "silu"
    gated: bool = True
    norm: NormKind = "rms"
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    learned_positions: bool = False
    residual_start: float = 1.0


PLAIN = Variant()
"""Llama."""


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer.

    Attributes:
        window: keys that a query sees, its own included; None: all before it.
        rope: another rotary embedding than the model's plain one.
        scale: of attention's scores, where it is not 1 / sqrt(D).
        feed_forward: takes the place of the dense half, or None.
    """

    window: int | None = None
    rope: Rope | None = None
    scale: float | None = None
    feed_forward: FeedForward | None = None


@dataclass(frozen=True)
class LayerShape:
    """One layer: x + attention, then + feed-forward.

    Attributes:
        rope: how queries and keys turn, or None.
        scale: multiplies query times key.
        feed_forward: the second half.
        window, cap, qk_norm, post_norms, qkv_bias, o_bias, start: as in LayerKind and Variant.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: Norm
    rope: Rope | None
    scale: float
    feed_forward: FeedForward
    window: int | None = None
    cap: float | None = None
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    start: float = 1.0

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
        head_norms = ("q_norm", "k_norm") if self.qk_norm else ()
        return (
            *self.norm.parameters("norm1", h),
            *linear_parameters("q", q, h, self.qkv_bias),
            *linear_parameters("k", kv, h, self.qkv_bias),
            *linear_parameters("v", kv, h, self.qkv_bias),
            *(p for name in head_norms for p in self.norm.parameters(name, self.head_dim)),
            *linear_parameters("o", h, q, self.o_bias, self.start),
            *(self.norm.parameters("post1", h) if self.post_norms else ()),
            *self.norm.parameters("norm2", h),
            *self.feed_forward.parameters(h, self.start),
            *(self.norm.parameters("post2", h) if self.post_norms else ()),
        )
