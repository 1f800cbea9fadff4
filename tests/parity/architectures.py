"""The table of architectures: one row each, with random tiny configs. Suites run once per row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packmule.shapes.model import ModelShape

ROWS = 512
"""Positions of every model."""
ORIGINAL = 64
"""Positions before a longer context, where a row has one; some documents are longer."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        model_type: of config.json.
        options: keys that differ from row to row, drawn anew; ... leaves a common key out.
        tied: whether embedding and head share a weight; None: either.
    """

    name: str
    model_type: str
    options: Callable[[random.Random, Config], Config]
    tied: bool | None = None

    def config(self, rng: random.Random, tied: bool | None = None) -> Config:
        """A random config.json; `tied` is drawn unless given or fixed by the row."""
        tied = rng.random() < 0.5 if tied is None else tied
        sizes = random_sizes(rng)
        common = {
            "model_type": self.model_type,
            "tie_word_embeddings": tied if self.tied is None else self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        merged = {**common, **sizes, **self.options(rng, sizes)}
        return {key: value for key, value in merged.items() if value is not ...}

    def shape(self, rng: random.Random, tied: bool | None = None) -> ModelShape:
        """What a random config reads as."""
        return ModelShape.from_config(self.config(rng, tied), self.name)


def random_sizes(rng: random.Random) -> Config:
    """A tiny decoder; head_dim * heads differs from hidden, the feed-forward width is odd."""
    kv_heads, head_dim = rng.choice((1, 2, 3)), rng.choice((6, 8, 10, 16))
    heads = kv_heads * rng.choice((1, 2, 3))
    return {
        "vocab_size": rng.randint(50, 130),
        "hidden_size": heads * (head_dim + rng.choice((-1, 1, 3))),
        "num_hidden_layers": rng.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 2 * rng.randint(10, 40) + 1,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "max_position_embeddings": ROWS,
    }


def _rope(**parameters: Any) -> Callable[[random.Random, Config], Config]:
    def options(rng: random.Random, sizes: Config) -> Config:
        return {"rope_parameters": {"rope_theta": rng.choice((1e4, 5e5)), **parameters}}

    return options


def _window(rng: random.Random) -> int:
    """Some documents are shorter, some longer; some windows are as long as a tile."""
    return rng.choice((2, 5, 33, 100, 128, 200))


def _mistral(rng: random.Random, sizes: Config) -> Config:
    return {"sliding_window": _window(rng)}


def _qwen(rng: random.Random, sizes: Config) -> Config:
    return {"use_sliding_window": True, "sliding_window": _window(rng), "max_window_layers": 1}


def _phi3(rng: random.Random, sizes: Config) -> Config:
    """Partial rotation and LongRope; the width of a head follows from the hidden size."""
    heads, head_dim = sizes["num_attention_heads"], rng.choice((8, 16))
    dims = head_dim * 3 // 4
    factors = [[rng.uniform(1, 4) for _ in range(dims // 2)] for _ in range(2)]
    return {
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "sliding_window": rng.choice((None, 100)),
        "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": factors[0], "long_factor": factors[1]},
    }


def _gemma(rng: random.Random, sizes: Config) -> Config:
    heads = sizes["num_attention_heads"]
    return {
        "hidden_size": heads * rng.randint(9, 13),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": rng.choice((7, 16, 24)),
        "sliding_window": _window(rng),
    }


def _gemma2(rng: random.Random, sizes: Config) -> Config:
    caps = {"attn_logit_softcapping": rng.uniform(1, 4), "final_logit_softcapping": rng.uniform(1, 4)}
    return {**_gemma(rng, sizes), **caps}


def _gemma3(rng: random.Random, sizes: Config) -> Config:
    return {
        **_gemma(rng, sizes),
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }


def _gpt2(rng: random.Random, sizes: Config) -> Config:
    heads, head_dim = sizes["num_attention_heads"], rng.choice((6, 7, 16))
    return {
        **dict.fromkeys(sizes, ...),
        "vocab_size": sizes["vocab_size"],
        "n_embd": heads * head_dim,
        "n_layer": sizes["num_hidden_layers"],
        "n_head": heads,
        "n_inner": rng.choice((None, sizes["intermediate_size"])),
        "n_positions": ROWS,
        "layer_norm_epsilon": sizes["rms_norm_eps"],
        "scale_attn_by_inverse_layer_idx": rng.random() < 0.5,
    }


def _mixtral(rng: random.Random, sizes: Config) -> Config:
    count = rng.randint(2, 6)
    return {
        "num_local_experts": count,
        "num_experts_per_tok": rng.randint(1, count),
        "router_aux_loss_coef": rng.choice((0.0, 0.3)),
        "sliding_window": rng.choice((None, 33)),
    }


def _qwen3_moe(rng: random.Random, sizes: Config) -> Config:
    """A dense layer among others."""
    return {
        "num_hidden_layers": 3,
        "num_experts": 5,
        "num_experts_per_tok": rng.randint(1, 4),
        "moe_intermediate_size": 2 * rng.randint(3, 10) + 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": rng.random() < 0.5,
        "router_aux_loss_coef": 0.3,
    }


ARCHITECTURES = (
    Architecture("llama", "llama", _rope()),
    Architecture("llama with biases", "llama", lambda rng, sizes: {"attention_bias": True, "mlp_bias": True}),
    Architecture("llama linear", "llama", _rope(rope_type="linear", factor=4.0)),
    Architecture("llama dynamic", "llama", _rope(rope_type="dynamic", factor=2.0)),
    Architecture(
        "llama yarn",
        "llama",
        _rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=ORIGINAL),
    ),
    Architecture(
        "llama 3.1",
        "llama",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=ORIGINAL,
        ),
    ),
    Architecture("mistral", "mistral", _mistral),
    Architecture("qwen2", "qwen2", _qwen),
    Architecture("qwen3", "qwen3", _qwen),
    Architecture("mixtral", "mixtral", _mixtral),
    Architecture("qwen3_moe", "qwen3_moe", _qwen3_moe),
    Architecture("phi3", "phi3", _phi3),
    Architecture("gemma2", "gemma2", _gemma2),
    Architecture("gemma3", "gemma3_text", _gemma3),
    Architecture("gpt2", "gpt2", _gpt2),
)
