"""config.json -> ModelShape: sizes of published models, refusals by name, and junk."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from tests.parity.architectures import ARCHITECTURES, Architecture

from packmule.errors import ConfigError
from packmule.shapes.bodies import layer_flops
from packmule.shapes.model import ModelShape


def sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, **more,
    }  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PUBLISHED = {
    "SmolLM2-135M": (
        {"model_type": "llama", "tie_word_embeddings": True, **sizes(576, 1536, 30, 9, 3, 49152)},
        134_515_008,
    ),
    "Llama-3.2-1B": (
        {
            "model_type": "llama", "tie_word_embeddings": True, "rope_scaling": LLAMA3, "rope_theta": 5e5,
            **sizes(2048, 8192, 16, 32, 8, 128256),
        },
        1_235_814_400,
    ),
    "Mistral-7B": (
        {"model_type": "mistral", "sliding_window": 4096, **sizes(4096, 14336, 32, 32, 8, 32000)},
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {"model_type": "qwen2", "tie_word_embeddings": True, **sizes(896, 4864, 24, 14, 2, 151936)},
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 128,
            **sizes(1024, 3072, 28, 16, 8, 151936),
        },
        596_049_920,
    ),
    "Phi-3-mini": (
        {"model_type": "phi3", "sliding_window": 2047, **sizes(3072, 8192, 32, 32, 32, 32064)},
        3_821_079_552,
    ),
    "Gemma-2-2b": ({"model_type": "gemma2", **sizes(2304, 9216, 26, 8, 4, 256000)}, 2_614_341_888),
    "Gemma-3-1b": ({"model_type": "gemma3_text", **sizes(1152, 6912, 26, 4, 1, 262144)}, 999_885_952),
    "GPT-2": (
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
        124_439_808,
    ),
}  # fmt: skip
"""Their config.json, as far as it is not what is left out anyway, and parameters."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert ModelShape.from_config(config, name).numel == parameters


def test_gemma_windows_alternate_and_gemma3_turns_locally() -> None:
    gemma2, gemma3 = (ModelShape.from_config(PUBLISHED[n][0], n) for n in ("Gemma-2-2b", "Gemma-3-1b"))
    assert [layer.window for layer in gemma2.layer_shapes[:4]] == [4096, None, 4096, None]
    assert [layer.window is None for layer in gemma3.layer_shapes[:7]] == [False] * 5 + [True, False]
    assert {layer.rope.theta for layer in gemma3.layer_shapes if layer.rope and layer.window} == {1e4}
    assert {layer.rope.theta for layer in gemma3.layer_shapes if layer.rope and not layer.window} == {1e6}
    assert len(gemma2.layer_groups) == len(gemma3.layer_groups) == 2


def test_a_window_takes_attention_flops_away() -> None:
    full, narrow = (
        ModelShape.from_config({**PUBLISHED["Mistral-7B"][0], "sliding_window": window}, "mistral").layer(1)
        for window in (None, 512)
    )
    pairs = sum(min(query + 1, 512) for query in range(4096))
    matmul, attention = layer_flops(narrow, 4096, 4096.0)
    assert attention == pytest.approx(4.0 * pairs * narrow.query_width, rel=2e-3)
    assert layer_flops(full, 4096, 4096.0)[0] == matmul
    assert layer_flops(narrow, 4096, 300.0) == layer_flops(full, 4096, 300.0)


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": parameters}


REFUSED = (
    ({"model_type": "bert"}, "model_type 'bert' is not supported"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, not a whole number of at most"),
    ({"num_attention_heads": True}, "'num_attention_heads' is True, not a whole number"),
    ({"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small', not a number above 0"),
    ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', not true or false"),
    ({"num_key_value_heads": 4}, "do not divide"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ({"rope_scaling": 3}, "'rope_scaling' is 3, not an object"),
    (rope(rope_type="spiral", factor=2.0), "rope_scaling: rope_type 'spiral' is not supported"),
    (rope(type="linear"), "rope_scaling: 'factor' is missing"),
    (rope(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=1.0), "low_freq_factor must"),
    (rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0] * 4), "'short_factor' is [1.0], not a"),
    (rope(rope_type="default", mrope_section=[1, 2]), "mrope_section is not supported"),
    ({"rope_theta": 1.0}, "rope_theta must be above 1"),
)
BASE = {"model_type": "llama", **sizes(24, 40, 2, 3, 3, 97)}


@pytest.mark.parametrize(("changes", "cause"), REFUSED, ids=[cause for _, cause in REFUSED])
def test_what_is_not_trained_is_refused_by_name(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_config({**BASE, **changes}, "config.json")
    assert caught.value.cause.startswith("config.json") and cause in caught.value.cause
    assert caught.value.hint


def test_families_refuse_what_only_they_could_mean() -> None:
    gemma, gpt2 = PUBLISHED["Gemma-2-2b"][0], PUBLISHED["GPT-2"][0]
    for config, cause in (
        ({**gemma, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**gemma, "layer_types": ["full_attention"]}, "not a list of 26 names"),
        ({**gemma, "layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({**gpt2, "add_cross_attention": True}, "add_cross_attention is not supported"),
        ({**gpt2, "n_head": 7}, "n_embd 768 is not a multiple of n_head 7"),
        ({**PUBLISHED["Qwen3-0.6B"][0], "max_window_layers": -1}, "'max_window_layers' is -1"),
    ):
        with pytest.raises(ConfigError) as caught:
            ModelShape.from_config(config, "config.json")
        assert cause in caught.value.cause


JUNK = (
    None, True, False, 0, 1, -1, 3, 2**31, 10**30, 0.5, -1.0, 1e308, math.inf, math.nan, "", "two", [], [1],
    ["a"], [[]], {}, {"a": 1}, {"rope_type": []}, {"rope_type": "yarn", "factor": 1e-300},
    {"type": "longrope"},
)  # fmt: skip


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_junk_in_a_config_is_an_error_with_a_message_or_a_model(row: Architecture, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        config = row.config(rng)
        keys = [*config, "rope_scaling", "rope_parameters", "layer_types", "head_dim", "sliding_window"]
        for key in rng.sample(keys, rng.randint(1, 3)):
            if key != "model_type":
                config[key] = rng.choice(JUNK)
        try:
            shape = ModelShape.from_config(config, "config.json")
        except ConfigError as error:
            assert error.cause.startswith("config.json") and error.hint
        else:
            assert shape.numel > 0
