"""RoPE tables against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from packmule.models.rope import rope_tables
from packmule.shapes.rope import Rope


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
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert mine.shape == (4096, 24)
        assert torch.equal(torch.cat((mine, mine), -1), theirs[0])


def test_float64_tables_are_exact_where_float32_is_not() -> None:
    rope = Rope(1e4, 48)
    cos, sin = rope_tables(rope, 4096, "float64")
    assert cos.dtype == sin.dtype == torch.float64
    assert float((cos**2 + sin**2 - 1).abs().max()) < 1e-15
    low, _ = rope_tables(rope, 4096, "float32")
    assert 1e-7 < float((low.double() - cos).abs().max()) < 1e-2
    assert float(cos[1, 1]) == pytest.approx(0.7767, abs=1e-4)  # cos(10000^(-2/48))
