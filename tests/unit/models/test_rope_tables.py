"""RoPE tables against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from packmule.models.rope import rope_tables
from packmule.shapes.config import Config
from packmule.shapes.rope import Rope, read_rope


@pytest.mark.parametrize("theta", (1e4, 5e5))
def test_float32_tables_equal_transformers_to_the_last_bit(theta: float) -> None:
    rope = Rope(theta, 48)
    config = transformers.LlamaConfig(
        hidden_size=96,
        num_attention_heads=2,
        head_dim=48,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(4096)[None])
    ours = rope_tables(rope, 4096, "float32")
    for mine, theirs in zip(ours[:2], (cos, sin), strict=True):
        assert mine.shape == (4096, 24)
        assert torch.equal(torch.cat((mine, mine), -1), theirs[0])


def test_float64_tables_are_exact_where_float32_is_not() -> None:
    rope = Rope(1e4, 48)
    cos, sin, _ = rope_tables(rope, 4096, "float64")
    assert cos.dtype == sin.dtype == torch.float64
    assert float((cos**2 + sin**2 - 1).abs().max()) < 1e-15
    low, *_ = rope_tables(rope, 4096, "float32")
    assert 1e-7 < float((low.double() - cos).abs().max()) < 1e-2
    assert float(cos[1, 1]) == pytest.approx(0.7767, abs=1e-4)  # cos(10000^(-2/48))


ORIGINAL = 256
PARTS = [[1.0 + i / 7 for i in range(24)], [2.0 + i / 3 for i in range(24)]]
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, all keys": {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 20.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "short_factor": PARTS[0], "long_factor": PARTS[1], "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_scaled_tables_equal_transformers_to_the_last_bit(name: str) -> None:
    parameters = {"rope_type": name, "rope_theta": 5e5, **SCALED[name]}
    common = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": 48, "max_position_embeddings": 4096}
    config = transformers.LlamaConfig(**common, rope_parameters=dict(parameters))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = rope_tables(read_rope(Config({**common, "rope_scaling": parameters}, "x"), 48), 4096, "float32")
    for length, first in ((ORIGINAL, 0), (4096, ours.long)):
        tables = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
        for mine, theirs in zip((ours.cos, ours.sin), tables, strict=True):
            rows = mine[first : first + length]
            assert torch.equal(torch.cat((rows, rows), -1), theirs[0])
    assert bool(ours.long) == (name == "longrope")


def test_longrope_tables_for_short_rows_have_no_long_part() -> None:
    scaling = {"rope_type": "longrope", **SCALED["longrope"]}
    config = Config({"max_position_embeddings": 4096, "rope_scaling": scaling}, "x")
    assert rope_tables(read_rope(config, 48), ORIGINAL, "float32").long == 0
