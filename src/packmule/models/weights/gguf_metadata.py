"""A model's settings as GGUF metadata and tensors. The way back is packmule.data.gguf_config.

The names are llama.cpp's (gguf-py/gguf/constants.py). What a file cannot say is found out by reading it
back: `difference` compares what comes out with what went in.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from packmule.data.gguf_config import llama3_factors
from packmule.data.gguf_families import GgufFamily
from packmule.shapes.layer import LayerShape
from packmule.shapes.model import ModelShape
from packmule.shapes.rope import Linear, Llama3, LongRope, Rope, Yarn

Vectors = dict[str, np.ndarray]


def model_metadata(shape: ModelShape, family: GgufFamily) -> tuple[dict[str, Any], Vectors]:
    """Keys and values (an int stands for uint32, a float for float32), and the vectors that follow from
    the settings (float32)."""
    layers = shape.layer_shapes
    # where only some layers have a window, the others' rotary embedding is the model's
    full = next((layer for layer in layers if layer.window is None), layers[0])
    epsilon = "layer_norm_epsilon" if shape.variant.norm == "layer" else "layer_norm_rms_epsilon"
    values: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        f"attention.{epsilon}": shape.norm_eps,
        **_experts(layers, family),
        **_windows(shape, full),
    }
    caps = {"attn": shape.variant.attention_cap, "final": shape.variant.logit_cap}
    values |= {f"{name}_logit_softcapping": cap for name, cap in caps.items() if cap is not None}
    vectors: Vectors = {}
    if full.rope is not None:
        scaling, vectors = _scaling(full.rope, shape.max_positions)
        values |= {"rope.dimension_count": full.rope.dims, "rope.freq_base": full.rope.theta, **scaling}
    return {f"{family.architecture}.{key}": value for key, value in values.items()}, vectors


def _experts(layers: tuple[LayerShape, ...], family: GgufFamily) -> dict[str, Any]:
    experts = layers[0].experts
    if experts is None:
        return {}
    found = {"expert_count": experts.count, "expert_used_count": experts.chosen}
    return found if family.architecture == "llama" else {**found, "expert_feed_forward_length": experts.width}


def _windows(shape: ModelShape, full: LayerShape) -> dict[str, Any]:
    windowed = next((layer for layer in shape.layer_shapes if layer.window is not None), None)
    if windowed is None or windowed.window is None:
        return {}
    found: dict[str, Any] = {"attention.sliding_window": windowed.window}
    if windowed.rope != full.rope and windowed.rope is not None:
        found["rope.freq_base_swa"] = windowed.rope.theta
    return found


def _scaling(rope: Rope, positions: int) -> tuple[dict[str, Any], Vectors]:
    scaling = rope.scaling
    if isinstance(scaling, Linear):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}, {}
    if isinstance(scaling, Yarn):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling.factor,
            "rope.scaling.original_context_length": scaling.original,
            "rope.scaling.yarn_beta_fast": scaling.fast,
            "rope.scaling.yarn_beta_slow": scaling.slow,
            "rope.scaling.yarn_attn_factor": scaling.attention,
        }, {}
    if isinstance(scaling, Llama3):
        parts = {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
        return {}, {"rope_freqs.weight": llama3_factors(rope.theta, rope.dims, parts).astype("<f4")}
    if isinstance(scaling, LongRope):
        return {
            "rope.scaling.original_context_length": scaling.original,
            "rope.scaling.attn_factor": scaling.attention,
        }, {
            "rope_factors_long.weight": np.array(scaling.long, "<f4"),
            "rope_factors_short.weight": np.array(scaling.short, "<f4"),
        }
    return {}, {}


def difference(one: ModelShape, other: ModelShape) -> str | None:
    """The first thing in which two shapes do not compute the same, as far as the float32 of a GGUF file
    tells; or None."""
    for ours, theirs in zip(_computed(one), _computed(other), strict=False):
        for key in ours:
            if ours[key] != theirs.get(key):
                return key
    return None if one.layers == other.layers else "layers"


def _computed(shape: ModelShape) -> list[dict[str, Any]]:
    """All that a forward pass depends on, layer by layer. A window that no text fills is none, and neither
    the balance of experts nor how they lie in blocks is anything a file keeps."""
    sizes = ("vocab", "hidden", "tied", "max_positions", "norm_eps")
    found: list[dict[str, Any]] = [
        {key: getattr(shape, key) for key in sizes},
        asdict(replace(shape.variant, residual_start=1.0)),
    ]
    for layer in shape.layer_shapes:
        window = None if layer.window is None or layer.window >= shape.max_positions else layer.window
        values = asdict(replace(layer, window=window))
        if layer.experts is not None:
            values["feed_forward"] |= {"balance": 0.0, "groups": 1}
        found.append(values)
    return [_narrow(part) for part in found]


def _narrow(value: Any) -> Any:
    """Floats as the nearest float32."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {key: _narrow(part) for key, part in value.items()}
    return [_narrow(part) for part in value] if isinstance(value, list | tuple) else value
