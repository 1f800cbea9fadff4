"""A Hugging Face config.json from a GGUF file's metadata. The way back is packmule.data.gguf_metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from packmule.data.gguf import GgufHeader, read_vector
from packmule.data.gguf_families import GgufFamily, family_of_file
from packmule.errors import DataError

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1 and 3.2 has; a file stores only the factors that follow from them."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The sizes whose attention scale is not the head's; llama.cpp knows them by their layers as well."""


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The config that packmule.shapes and transformers read.

    Floats are the shortest decimals whose float32 the file stores (1e-05, not 9.99999974e-06).
    A file without `output.weight` has tied embeddings.

    Raises:
        DataError: an architecture or a kind of RoPE scaling that is not supported, or damaged metadata.
    """
    family = family_of_file(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DataError(f"{header.path}: tensor 'token_embd.weight' is missing.", "get the model again")
    config: dict[str, Any] = {
        "architectures": [family.causal_class],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "initializer_range": 0.02,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    config |= _gpt2(header) if family.architecture == "gpt2" else _decoder(header, family)
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = header.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token_id"] = token if isinstance(token, int) else None
    return config


def _decoder(header: GgufHeader, family: GgufFamily) -> dict[str, Any]:
    name = family.architecture
    hidden = header.count(f"{name}.embedding_length")
    heads = header.count(f"{name}.attention.head_count")
    head_dim = header.count(f"{name}.attention.key_length", max(1, hidden // heads))
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": _layers(header, name),
        "num_attention_heads": heads,
        "num_key_value_heads": header.count(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": header.count(f"{name}.context_length", 2048),
        "rms_norm_eps": _decimal(header, f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _decimal(header, f"{name}.rope.freq_base", 10000.0),
    }
    # a file whose layers are all of experts need not state a dense width
    if not family.experts or f"{name}.feed_forward_length" in header.metadata:
        config["intermediate_size"] = header.count(f"{name}.feed_forward_length")
    if family.model_type != "phi3" and header.count(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise DataError(f"{header.path} rotates only part of each head.", "give a model with full RoPE")
    scaling = _scaling(header, name, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _EXTRAS[family.model_type](header, config)


def _llama(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }


def _mistral(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": header.count("llama.attention.sliding_window")}


def _mixtral(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": header.count("llama.expert_count"),
        "num_experts_per_tok": header.count("llama.expert_used_count"),
        "sliding_window": header.metadata.get("llama.attention.sliding_window") or None,
    }


def _qwen2(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise DataError(f"{header.path}: head sizes that no Qwen2 has.", "give a Qwen2 or Qwen2.5 model")
    del config["head_dim"]
    return {"use_sliding_window": False}


def _qwen3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": False, "use_sliding_window": False}


def _qwen3_moe(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    width = header.count("qwen3moe.expert_feed_forward_length")
    return {
        "attention_bias": False,
        "use_sliding_window": False,
        "intermediate_size": config.get("intermediate_size", width),
        "moe_intermediate_size": width,
        "num_experts": header.count("qwen3moe.expert_count"),
        "num_experts_per_tok": header.count("qwen3moe.expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(header, "gemma2", config),
        "attn_logit_softcapping": _decimal(header, "gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _decimal(header, "gemma2.final_logit_softcapping", 30.0),
        "sliding_window": header.count("gemma2.attention.sliding_window", 4096),
    }


def _gemma3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    # five windowed layers, then one that sees all; a file without a window has none
    window = header.metadata.get("gemma3.attention.sliding_window") or None
    kinds = ["sliding_attention" if window and (i + 1) % 6 else "full_attention" for i in range(layers)]
    return {
        **_gemma(header, "gemma3", config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": _decimal(header, "gemma3.final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": kinds,
        "rope_local_base_freq": _decimal(header, "gemma3.rope.freq_base_swa", 10000.0),
    }


def _gemma(header: GgufHeader, name: str, config: dict[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[name]
    head = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    del config["hidden_act"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head,
        "attention_bias": False,
    }


def _phi3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    rotated = header.count("phi3.rope.dimension_count", config["head_dim"])
    positions = config["max_position_embeddings"]
    window = header.metadata.get("phi3.attention.sliding_window")
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "original_max_position_embeddings": header.count(
            "phi3.rope.scaling.original_context_length", positions
        ),
        "sliding_window": window if isinstance(window, int) and 0 < window < positions else None,
        "attention_bias": False,
    }


_EXTRAS: dict[str, Callable[[GgufHeader, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "qwen2": _qwen2, "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe, "gemma2": _gemma2, "gemma3_text": _gemma3, "phi3": _phi3,
}  # fmt: skip


def _gpt2(header: GgufHeader) -> dict[str, Any]:
    return {
        "n_embd": header.count("gpt2.embedding_length"),
        "n_layer": _layers(header, "gpt2"),
        "n_head": header.count("gpt2.attention.head_count"),
        "n_positions": header.count("gpt2.context_length"),
        "n_inner": header.count("gpt2.feed_forward_length"),
        "layer_norm_epsilon": _decimal(header, "gpt2.attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _layers(header: GgufHeader, name: str) -> int:
    layers = header.count(f"{name}.block_count")
    if layers > len(header.tensors):
        raise DataError(
            f"{header.path} claims {layers} layers with {len(header.tensors)} tensors.", "get the model again"
        )
    return layers


def _scaling(header: GgufHeader, name: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, or None."""
    if "rope_freqs.weight" in header.tensors:
        return _llama3(header, config)
    if "rope_factors_long.weight" in header.tensors:
        found: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": _decimals(read_vector(header, "rope_factors_long.weight")),
            "short_factor": _decimals(read_vector(header, "rope_factors_short.weight")),
        }
        if f"{name}.rope.scaling.attn_factor" in header.metadata:
            found["attention_factor"] = _decimal(header, f"{name}.rope.scaling.attn_factor")
        return found
    kind = header.metadata.get(f"{name}.rope.scaling.type", "none")
    # before there were types there was linear scaling
    old = header.metadata.get(f"{name}.rope.scale_linear", 1.0)
    factor = _decimal(header, f"{name}.rope.scaling.factor", old if isinstance(old, float) else 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise DataError(
            f"{header.path}: RoPE scaling {kind!r:.80} is not supported.", "give the Hugging Face folder"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.count(f"{name}.rope.scaling.original_context_length"),
    }
    stated = {
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    for ours, theirs in stated.items():
        if f"{name}.rope.scaling.{theirs}" in header.metadata:
            found[ours] = _decimal(header, f"{name}.rope.scaling.{theirs}")
    return found


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """What each RoPE frequency is divided by in Llama 3.1 (float64 [head_dim / 2]).

    Low frequencies are divided by `factor`, high ones are left, and between the two wavelengths
    (of the original context by low_freq_factor and high_freq_factor) it goes smoothly.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / scaling["factor"] + share)


def _llama3(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    stored = read_vector(header, "rope_freqs.weight")
    scaling = {"rope_type": "llama3", "factor": max(1.0, float(np.max(stored))), **_LLAMA3}
    expected = llama3_factors(config["rope_theta"], config["head_dim"], scaling)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-5, atol=0):
        raise DataError(
            f"{header.path}: its RoPE factors are not those of a Llama 3.1 or 3.2.",
            "give the model's Hugging Face folder, whose config.json states them",
        )
    return scaling


def _decimals(values: np.ndarray) -> list[float]:
    return [float(str(value)) for value in values]


def _decimal(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.require(key) if default is None else header.metadata.get(key, default)
    # NaN fails the comparison; no setting comes near what float32 can hold
    if not isinstance(value, float) or not abs(value) < 1e30:
        raise DataError(f"{header.path}: {key!r} is {value!r:.80}, not a number.", "convert the model again")
    return float(str(np.float32(value)))
