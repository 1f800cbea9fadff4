"""A decoder's architecture: from a Hugging Face config to blocks of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packmule.errors import ConfigError
from packmule.shapes.layout import PAGE, Layout, TensorSpec, layout

BlockKind = Literal["embed", "layer", "head"]
Role = Literal["embedding", "norm", "matrix"]


class Parameter(NamedTuple):
    """One trainable tensor. `name` is local to its block ("q.weight")."""

    name: str
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True)
class Block:
    """One unit of streaming.

    Attributes:
        index: position in the model: embed 0, layers 1..L, head L + 1.
        kind: which task bodies it runs.
        parameters: the tensors this block owns.
        shared: index of the block whose `weight` this head reads as its own (tied), or None.
    """

    index: int
    name: str
    kind: BlockKind
    parameters: tuple[Parameter, ...]
    shared: int | None = None

    def specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """The owned parameters as tensors of one dtype."""
        return tuple(TensorSpec(p.name, p.shape, dtype) for p in self.parameters)

    def layout(self, dtype: str) -> Layout:
        """How the owned parameters lie in a weight, gradient or plane buffer (pages)."""
        return layout(self.specs(dtype), PAGE)

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs("float32"))


@dataclass(frozen=True)
class ModelShape:
    """A Llama-family decoder (Touvron et al. 2023; GQA: Ainslie et al. 2023)."""

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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> ModelShape:
        """Read a Hugging Face `config.json`.

        Raises:
            ConfigError: an architecture or option this version does not train.
        """
        kind = config.get("model_type")
        if kind != "llama":
            raise ConfigError(f"{source}: model_type {kind!r} is not supported.", "supported: llama")
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or (
            rope if rope.get("rope_type", "default") != "default" else None
        )
        if scaling and scaling.get("rope_type", scaling.get("type")) not in (None, "default"):
            raise ConfigError(
                f"{source}: rope_scaling {scaling!r} is not supported.", "use a model without RoPE scaling"
            )
        for flag in ("attention_bias", "mlp_bias"):
            if config.get(flag):
                raise ConfigError(f"{source}: {flag} is not supported.", "use a model without biases")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"{source}: hidden_act {config['hidden_act']!r} is not supported.", "supported: silu"
            )
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            shape = cls(
                vocab=int(config["vocab_size"]),
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                ffn=int(config["intermediate_size"]),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                tied=bool(config.get("tie_word_embeddings", False)),
                max_positions=int(config.get("max_position_embeddings", 2048)),
            )
        except KeyError as error:
            raise ConfigError(
                f"{source}: {error.args[0]!r} is missing.", "use the model's full config.json"
            ) from None
        if shape.heads % shape.kv_heads or shape.head_dim % 2:
            raise ConfigError(
                f"{source}: {shape.heads} heads, {shape.kv_heads} key/value heads, "
                f"head_dim {shape.head_dim} do not divide.",
                "restore the model's own config.json",
            )
        return shape

    def blocks(self) -> tuple[Block, ...]:
        """Embed, layers, head, in forward order."""
        h, f = self.hidden, self.ffn
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = (
            Parameter("norm1.weight", (h,), "norm"),
            Parameter("q.weight", (q, h), "matrix"),
            Parameter("k.weight", (kv, h), "matrix"),
            Parameter("v.weight", (kv, h), "matrix"),
            Parameter("o.weight", (h, q), "matrix"),
            Parameter("norm2.weight", (h,), "norm"),
            Parameter("gate.weight", (f, h), "matrix"),
            Parameter("up.weight", (f, h), "matrix"),
            Parameter("down.weight", (h, f), "matrix"),
        )
        head = [Parameter("norm.weight", (h,), "norm")]
        if not self.tied:
            head.append(Parameter("weight", (self.vocab, h), "matrix"))
        return (
            Block(0, "embed", "embed", (Parameter("weight", (self.vocab, h), "embedding"),)),
            *(Block(i + 1, f"layer{i}", "layer", layer) for i in range(self.layers)),
            Block(self.layers + 1, "head", "head", tuple(head), 0 if self.tied else None),
        )

    @property
    def numel(self) -> int:
        """Trainable parameters, tied ones counted once."""
        return sum(block.numel for block in self.blocks())
