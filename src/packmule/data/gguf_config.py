"""A Hugging Face config.json from a llama GGUF file's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from packmule.data.gguf import GgufHeader
from packmule.errors import DataError


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The config that packmule.shapes and transformers read.

    Floats are the shortest decimals whose float32 the file stores (1e-05, not 9.99999974e-06).
    A file without `output.weight` has tied embeddings.

    Raises:
        DataError: not a llama model, or one with experts, partial or scaled RoPE.
    """
    architecture = header.require("general.architecture")
    if architecture != "llama":
        raise DataError(f"{header.path}: architecture {architecture!r} is not supported.", "supported: llama")
    data = header.metadata
    hidden = header.count("llama.embedding_length")
    heads = header.count("llama.attention.head_count")
    head_dim = header.count("llama.attention.key_length", hidden // heads)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise DataError(f"{header.path}: tensor 'token_embd.weight' is missing.", "get the model again")
    _refuse(header, head_dim)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.shape[0] if embedding.shape else 0,
        "hidden_size": hidden,
        "intermediate_size": header.count("llama.feed_forward_length"),
        "num_hidden_layers": header.count("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": header.count("llama.context_length", 2048),
        "initializer_range": 0.02,
        "rms_norm_eps": _decimal(header, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _decimal(header, "llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = data.get(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token_id"] = token if isinstance(token, int) else None
    return config


def _refuse(header: GgufHeader, head_dim: int) -> None:
    data = header.metadata
    if data.get("llama.expert_count", 0) != 0:
        raise DataError(f"{header.path} is a mixture of experts.", "give a dense Llama model")
    if header.count("llama.rope.dimension_count", head_dim) != head_dim:
        raise DataError(f"{header.path} rotates only part of each head.", "give a model with full RoPE")
    scaling = data.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        kind = scaling if scaling != "none" else "llama3"
        raise DataError(
            f"{header.path}: RoPE scaling {kind!r} is not supported.", "give a model without RoPE scaling"
        )


def _decimal(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.require(key) if default is None else header.metadata.get(key, default)
    if not isinstance(value, float):
        raise DataError(f"{header.path}: {key!r} is {value!r}, not a number.", "convert the model again")
    return float(str(np.float32(value)))
