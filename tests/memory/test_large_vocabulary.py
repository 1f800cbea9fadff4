"""A tied vocabulary of 100,000 tokens, far larger than the layers, in 150 MB: in parts, through the command
line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.memory.above_baseline import STEPS, train_within

from packmule.shapes.model import ModelShape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100_003,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
ABOVE_BASELINE = 150_000_000


@pytest.mark.slow
def test_a_large_tied_vocabulary_trains_within_150_mb_above_the_baseline(tmp_path: Path) -> None:
    shape = ModelShape.from_config(CONFIG, "this test")
    assert shape.vocab * shape.hidden > 0.9 * shape.numel
    assert 12 * shape.numel > 2 * ABOVE_BASELINE
    train = {"max_seq_length": 32, "micro_batch_size": 2, "recompute": True}  # fewer plans to look at
    run = train_within(tmp_path, CONFIG, ABOVE_BASELINE, (100, 32), train, {})
    head = json.loads((run / "HEAD.json").read_text())
    assert head["step"] == STEPS
    assert head["numerics"]["vocabulary_parts"] > 1
