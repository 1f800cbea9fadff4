"""A model's settings as GGUF metadata. The way back is packmule.data.gguf_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packmule.data.gguf_families import GgufFamily
from packmule.shapes.model import ModelShape


def model_metadata(shape: ModelShape, config: Mapping[str, Any], family: GgufFamily) -> dict[str, Any]:
    """Keys and values; an int stands for uint32, a float for float32."""
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
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_theta,
    }
    return {f"{family.architecture}.{key}": value for key, value in values.items()}
