"""Every family's .gguf file holds its settings and rounded weights; what the format cannot say is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.unit.weights.test_source import prepared, read

from packmule.data.gguf import read_gguf
from packmule.data.gguf_config import gguf_config
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.manifest import gguf_manifest
from packmule.errors import ConfigError
from packmule.models.weights.export import write_huggingface
from packmule.models.weights.gguf_export import GgufDtype, write_gguf
from packmule.models.weights.gguf_metadata import difference
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import Block, ModelShape, Parameter

VOCAB = 440
Config = dict[str, Any]
FACTORS = [[1.0, 1.5, 2.25, 3.0], [1.25, 2.0, 4.0, 8.0]]


def _base(rng: random.Random) -> Config:
    heads = 4
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2, heads)),
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "max_position_embeddings": 512,
        "rope_theta": rng.choice((1e4, 5e5)),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _scaled(**scaling: Any) -> Callable[[random.Random], Config]:
    return lambda rng: {"model_type": "llama", "rope_scaling": scaling}


def _phi3(rng: random.Random) -> Config:
    return {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": FACTORS[0], "long_factor": FACTORS[1]},
        "pad_token_id": 0,
    }


def _gemma(rng: random.Random) -> Config:
    # a head's width of its own, as the real ones have
    return {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": rng.choice((4, 33)),
        "tie_word_embeddings": True,
    }


def _gemma2(rng: random.Random) -> Config:
    caps = {"attn_logit_softcapping": rng.choice((2.0, 50.0)), "final_logit_softcapping": 1.5}
    return {"model_type": "gemma2", **_gemma(rng), **caps}


def _gemma3(rng: random.Random) -> Config:
    return {
        "model_type": "gemma3_text",
        **_gemma(rng),
        "num_hidden_layers": 7,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": rng.choice((None, {"rope_type": "linear", "factor": 8.0})),
    }


def _gpt2(rng: random.Random) -> Config:
    names = ("vocab_size", "tie_word_embeddings")
    kept = {key: value for key, value in _base(rng).items() if key in names}
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": rng.choice((None, 96))}
    return {"model_type": "gpt2", **kept, **sizes, "layer_norm_epsilon": 1e-5}


MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
ROWS: dict[str, Callable[[random.Random], Config]] = {
    "llama with biases": lambda rng: {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama linear": _scaled(rope_type="linear", factor=4.0),
    "llama yarn": _scaled(rope_type="yarn", factor=8.0, original_max_position_embeddings=64),
    "llama 3.1": _scaled(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "mistral": lambda rng: {"model_type": "mistral", "sliding_window": rng.choice((None, 4, 100))},
    "qwen2": lambda rng: {"model_type": "qwen2"},
    "qwen3": lambda rng: {"model_type": "qwen3", "head_dim": 32},
    "mixtral": lambda rng: {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": None, **MOE},
    "qwen3_moe": lambda rng: {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        **MOE,
    },
    "phi3": lambda rng: {"model_type": "phi3", "pad_token_id": 0},
    "phi3 long": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3 without windows": lambda rng: {**_gemma3(rng), "layer_types": ["full_attention"] * 7},
    "gpt2": _gpt2,
}
ELSEWHERE = ("qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3", "gpt2")
"""Rows whose settings transformers reads from GGUF in full."""


def config_of(row: str, rng: random.Random, **changes: Any) -> Config:
    base = {} if row == "gpt2" else _base(rng)
    return {**base, **ROWS[row](rng), **changes}


class Weights:
    """Random weights by block and parameter, given out in uneven chunks."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.values = {
            (b.name, p.name): rng.standard_normal(p.shape, np.float32) * np.float32(0.2)
            for b in shape.blocks()
            for p in b.parameters
        }

    def __call__(self, block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        flat = self.values[block.name, parameter.name].reshape(-1)
        for at in range(0, len(flat), 777):
            yield flat[at : at + 777]

    def round(self, shape: ModelShape, dtype: str) -> None:
        """As the file holds them: vectors, routers and learned positions in fp32, Gemma's norms plus one."""
        for block in shape.blocks():
            for parameter in block.parameters:
                key, role = (block.name, parameter.name), parameter.role
                value = self.values[key]
                if role == "norm" and shape.variant.norm_offset:
                    self.values[key] = (value + np.float32(1)) - np.float32(1)
                elif value.ndim == 2 and not parameter.name.startswith(("router", "positions")):
                    kind = gguf.GGMLQuantizationType["F16" if value.shape[1] % 32 else dtype]
                    self.values[key] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)


@pytest.fixture
def folder(byte_level: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    tokenizer_from_gguf(byte_level("smollm")).save(path)
    return path


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("row", ROWS)
def test_a_family_comes_back_with_its_settings_and_rounded_weights(
    row: str, dtype: GgufDtype, folder: Path, tmp_path: Path, seed: int
) -> None:
    config = config_of(row, random.Random(seed))
    shape = ModelShape.from_config(config, "test")
    weights, path = Weights(shape, seed), tmp_path / "out.gguf"
    write_gguf(path, shape, config, weights, dtype, folder)
    found = ModelShape.from_config(gguf_config(read_gguf(path)), "out")
    assert difference(found, shape) is None
    weights.round(shape, dtype)
    with WeightSource.open(prepared(tmp_path / "m", gguf_manifest(path))) as source:
        source.check(found)
        for ours, block in zip(found.blocks(), shape.blocks(), strict=True):
            assert ours.parameters == block.parameters
            for parameter in ours.parameters:
                value = read(source, ours, parameter, 3000)
                assert np.array_equal(value, weights.values[block.name, parameter.name]), parameter.name


@pytest.mark.parametrize("row", ELSEWHERE)
def test_transformers_computes_the_same_from_the_file(
    row: str, folder: Path, tmp_path: Path, seed: int
) -> None:
    """In one of the encodings, by chance."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # what transformers does not read from the file but takes from its own defaults
    gemma = {"head_dim": 256, "query_pre_attn_scalar": 256}
    fixed = {
        "qwen3": {"head_dim": 128},
        "qwen3_moe": {"moe_intermediate_size": 768},
        "gemma2": {**gemma, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "gemma3": {**gemma, "rope_scaling": None},
        "gpt2": {"n_inner": None, "n_positions": 1024},
    }
    rng = random.Random(seed)
    dtype: GgufDtype = rng.choice(("F32", "F16", "Q8_0"))
    config = config_of(row, rng, **fixed.get(row, {}))
    shape = ModelShape.from_config(config, "test")
    weights = Weights(shape, seed)
    write_gguf(tmp_path / "out.gguf", shape, config, weights, dtype, folder)
    weights.round(shape, dtype)
    write_huggingface(tmp_path / "ref", shape, config, weights, "float32")
    eager = {"experts_implementation": "eager"} if "num_experts_per_tok" in config else {}
    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(tmp_path / "ref", dtype=torch.float32, **eager).eval()
    model = load(tmp_path, gguf_file="out.gguf", dtype=torch.float32, **eager).eval()
    ids = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize(("row", "changes", "setting"), [
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "window"),
    ("qwen3_moe", {"norm_topk_prob": False}, "feed forward"),
    ("gemma2", {"query_pre_attn_scalar": 7}, "scale"),
    ("gemma3", {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, "rope"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale"),
    ("llama 3.1", {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}, "settings"),
])  # fmt: skip
def test_what_the_format_cannot_say_is_refused(
    row: str, changes: Config, setting: str, folder: Path, tmp_path: Path, seed: int
) -> None:
    config = config_of(row, random.Random(seed), **changes)
    shape = ModelShape.from_config(config, "test")
    with pytest.raises(ConfigError, match=f"differs in: {setting}\\."):
        write_gguf(tmp_path / "out.gguf", shape, config, Weights(shape, 0), "F16", folder)
    assert not list(tmp_path.glob("out*"))


def test_a_dense_layer_among_experts_is_refused(folder: Path, tmp_path: Path, seed: int) -> None:
    config = config_of("qwen3_moe", random.Random(seed), mlp_only_layers=[1])
    shape = ModelShape.from_config(config, "test")
    with pytest.raises(ConfigError, match=r"no name for .*layers\.1\.mlp\.gate_proj"):
        write_gguf(tmp_path / "out.gguf", shape, config, Weights(shape, 0), "F16", folder)
