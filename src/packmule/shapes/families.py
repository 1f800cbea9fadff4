"""The table of model families: how each `model_type` of a config.json reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packmule.errors import ConfigError
from packmule.shapes.config import Config
from packmule.shapes.layer import LayerKind, Variant
from packmule.shapes.mlp import Activation

ACTIVATIONS: dict[str, Activation] = {"silu": "silu"}
"""Names in a config -> ours."""


def _alike(config: Config) -> tuple[LayerKind, ...]:
    return ()


@dataclass(frozen=True)
class Family:
    """How one model_type reads.

    Attributes:
        architecture: what transformers calls its class.
        variant: what sets its layers apart from Llama's.
        kinds: what differs from layer to layer, one per layer; none where nothing does.
        defaults: what transformers takes for keys that are left out.
        aliases: key -> its name in this family's files.
    """

    architecture: str
    variant: Callable[[Config], Variant]
    kinds: Callable[[Config], tuple[LayerKind, ...]] = _alike
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


def _activation(config: Config) -> Activation:
    name = config.get("hidden_act")
    if name not in ACTIVATIONS:
        raise config.unsupported("hidden_act", ACTIVATIONS)
    return ACTIVATIONS[name]


def _default_rope(config: Config) -> None:
    """Refuse scaled rotary embeddings."""
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        if (section.get("rope_type") or section.get("type")) not in (None, "default"):
            raise ConfigError(
                f"{config.source}: {key} {config.get(key)!r} is not supported.",
                "use a model without RoPE scaling",
            )


def _llama(config: Config) -> Variant:
    config.refuse("attention_bias", "mlp_bias")
    _default_rope(config)
    return Variant(activation=_activation(config))


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _llama,
        defaults={"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    ),
}
