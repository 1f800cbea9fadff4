"""A decoder's architecture: from a Hugging Face config to blocks of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from packmule.errors import ConfigError
from packmule.shapes.blocks import Block, Parameter
from packmule.shapes.config import Config
from packmule.shapes.experts import Experts
from packmule.shapes.families import FAMILIES, MOST_LAYERS
from packmule.shapes.layer import PLAIN, LayerKind, LayerShape, Norm, Variant
from packmule.shapes.layout import ITEMSIZE
from packmule.shapes.mlp import Mlp
from packmule.shapes.rope import Rope
from packmule.shapes.vocabulary import cut_blocks

if TYPE_CHECKING:
    from packmule.shapes.bodies import Dtypes


@dataclass(frozen=True)
class ModelShape:
    """A decoder of one of the FAMILIES (Llama: Touvron et al. 2023; GQA: Ainslie et al. 2023).

    Attributes:
        ffn: F of the dense layers.
        rope_theta: base of the rotary wavelengths.
        tied: whether the head's weight is the embedding's.
        family: its model_type.
        variant: what sets its layers apart from Llama's.
        kinds: what differs from layer to layer, one per layer; none where nothing does.
        vocabulary_parts: blocks that embedding and head are each cut into (packmule.shapes.vocabulary).
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope_theta: float
    tied: bool
    max_positions: int
    family: str = "llama"
    variant: Variant = PLAIN
    kinds: tuple[LayerKind, ...] = ()
    vocabulary_parts: int = 1

    @classmethod
    def from_config(cls, values: Mapping[str, Any], source: str) -> ModelShape:
        """Read a Hugging Face `config.json`.

        Raises:
            ConfigError: an architecture or option this version does not train.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} is not a JSON object.", "use the model's own config.json")
        kind = values.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ConfigError(
                f"{source}: model_type {kind!r} is not supported.", f"supported: {', '.join(FAMILIES)}"
            )
        family = FAMILIES[kind]
        config = Config(values, source, family.defaults, family.aliases)
        heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
        shape = cls(
            vocab=config.integer("vocab_size"),
            hidden=hidden,
            layers=config.integer("num_hidden_layers", MOST_LAYERS),
            heads=heads,
            kv_heads=config.optional_integer("num_key_value_heads") or heads,
            head_dim=config.optional_integer("head_dim") or hidden // heads,
            ffn=_ffn(config, family.ffn_factor, hidden),
            norm_eps=config.number("rms_norm_eps", 1e-6),
            rope_theta=config.section("rope_parameters").optional_number("rope_theta")
            or config.number("rope_theta", 1e4),
            tied=config.flag("tie_word_embeddings"),
            max_positions=config.integer("max_position_embeddings"),
            family=kind,
            variant=family.variant(config),
            kinds=family.layer_kinds(config),
        )
        odd = any(layer.rope and layer.rope.dims % 2 for layer in shape.layer_shapes)
        if shape.heads % shape.kv_heads or odd:
            raise ConfigError(
                f"{source}: {shape.heads} heads, {shape.kv_heads} key/value heads, "
                f"head_dim {shape.head_dim} do not divide.",
                "restore the model's own config.json",
            )
        return shape

    def balanced(self, factor: float | None) -> ModelShape:
        """The same model with another factor of the load-balancing loss; itself for None.

        Raises:
            ConfigError: there are no experts to balance.
        """
        if factor is None:
            return self
        experts = [kind.feed_forward for kind in self.kinds if isinstance(kind.feed_forward, Experts)]
        if not experts:
            raise ConfigError(
                f"`train.router_aux_loss_coef` = {factor:g} balances experts, and the model ({self.family}) "
                "has none.",
                "leave it out",
            )
        kinds = tuple(
            replace(kind, feed_forward=replace(kind.feed_forward, balance=factor))
            if isinstance(kind.feed_forward, Experts)
            else kind
            for kind in self.kinds
        )
        return replace(self, kinds=kinds)

    def cut(self, parts: int) -> ModelShape:
        """The same model with its vocabulary in so many parts."""
        return self if parts == self.vocabulary_parts else _cut(self, parts)

    @property
    def norm(self) -> Norm:
        """Every norm's form."""
        return Norm(self.norm_eps, self.variant.norm, self.variant.norm_offset)

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Every layer in full; layers that are alike share one object."""
        made: dict[LayerKind, LayerShape] = {}
        kinds = self.kinds or (LayerKind(),) * self.layers
        return tuple(made.setdefault(kind, self._layer(kind)) for kind in kinds)

    def _layer(self, kind: LayerKind) -> LayerShape:
        variant = self.variant
        return LayerShape(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm=self.norm,
            rope=None if variant.learned_positions else kind.rope or Rope(self.rope_theta, self.head_dim),
            scale=kind.scale or self.head_dim**-0.5,
            feed_forward=kind.feed_forward
            or Mlp(self.ffn, variant.activation, variant.gated, variant.mlp_bias),
            window=kind.window,
            cap=variant.attention_cap,
            qk_norm=variant.qk_norm,
            post_norms=variant.post_norms,
            qkv_bias=variant.qkv_bias,
            o_bias=variant.o_bias,
            start=variant.residual_start,
        )

    @cached_property
    def layer_groups(self) -> tuple[tuple[LayerShape, tuple[int, ...]], ...]:
        """Each distinct layer with the positions (from 0) of those that are like it."""
        found: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layer_shapes):
            found.setdefault(id(layer), []).append(index)
        return tuple((self.layer_shapes[group[0]], tuple(group)) for group in found.values())

    def layer(self, block: int) -> LayerShape:
        """The layer that block number `block` is, or belongs to."""
        return self.layer_shapes[self._blocks[block].layer]

    def blocks(self) -> tuple[Block, ...]:
        """Embed, layers (those with experts in several blocks), head, in forward order. Where the
        vocabulary is cut, embed and head are several blocks too."""
        return self._blocks

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        if self.vocabulary_parts == 1:
            return self._whole_blocks
        return cut_blocks(self._whole_blocks, self.vocabulary_parts)

    @cached_property
    def _whole_blocks(self) -> tuple[Block, ...]:
        head = [*self.norm.parameters("norm", self.hidden)]
        if not self.tied:
            head.append(Parameter("weight", (self.vocab, self.hidden), "matrix"))
        embed, family = [Parameter("weight", (self.vocab, self.hidden), "embedding")], self.family
        if self.variant.learned_positions:
            embed.append(Parameter("positions.weight", (self.max_positions, self.hidden), "embedding"))
        found = [Block(0, "embed", "embed", tuple(embed), family=family)]
        for i, layer in enumerate(self.layer_shapes):
            owned = layer.parameters()
            found.append(Block(len(found), f"layer{i}", "layer", owned, layer=i, family=family))
            for group, experts in enumerate(layer.experts.ranges() if layer.experts else ()):
                name, owned = f"layer{i}.experts{group}", layer.expert_parameters(experts)
                block = Block(len(found), name, "experts", owned, layer=i, experts=experts, family=family)
                found.append(block)
        shared = 0 if self.tied else None
        found.append(Block(len(found), "head", "head", tuple(head), shared, family=family))
        return tuple(found)

    def stream_bytes(self, tokens: int, types: Dtypes) -> int:
        """Of the residual stream."""
        return tokens * self.hidden * ITEMSIZE[types.compute]

    @property
    def numel(self) -> int:
        """Trainable parameters, tied ones counted once."""
        return sum(block.numel for block in self.blocks())


@lru_cache(maxsize=256)
def _cut(shape: ModelShape, parts: int) -> ModelShape:
    """Asked for by every plan that is looked at, and its blocks are made once."""
    return replace(shape, vocabulary_parts=parts)


def _ffn(config: Config, factor: int | None, hidden: int) -> int:
    if factor is None:
        return config.integer("intermediate_size")
    return config.optional_integer("intermediate_size") or factor * hidden
