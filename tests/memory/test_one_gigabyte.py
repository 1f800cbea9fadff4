"""1 GB of training state in 250 MB: everything on disk, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.memory.above_baseline import STEPS, train_within

from packmule.shapes.model import ModelShape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 25,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
ABOVE_BASELINE = 250_000_000


@pytest.mark.slow
def test_1_gb_of_state_trains_within_250_mb_above_the_baseline(tmp_path: Path) -> None:
    state = 12 * ModelShape.from_config(CONFIG, "this test").numel
    assert state > 1_000_000_000
    train = {"max_seq_length": 64, "precision": "fp32"}
    hardware = {"state": "disk", "gradients": "disk", "inputs": "disk"}
    run = train_within(tmp_path, CONFIG, ABOVE_BASELINE, (2000, 64), train, hardware)
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps[-1] == STEPS
