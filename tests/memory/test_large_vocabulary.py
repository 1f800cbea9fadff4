"""A tied vocabulary of 100,000 tokens, far larger than the layers, in 150 MB: in parts, through the command
line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from benchmarks.memory_accuracy import run_tool, write_model, write_texts

from packmule.probe import load
from packmule.shapes.model import ModelShape
from packmule.spec.environment import read_environment

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
    write_model(tmp_path / "model", CONFIG)
    write_texts(tmp_path / "text.jsonl", random.Random(0), 100, 32)
    hardware = load(read_environment().cache / "probe.json", tmp_path)
    budget = hardware.parent_baseline_bytes + hardware.child_baseline_bytes + ABOVE_BASELINE
    job = {
        "model": {"path": str(tmp_path / "model"), "init": "random"},
        "data": {"path": str(tmp_path / "text.jsonl"), "val_size": 0},
        "train": {
            "output_dir": str(tmp_path / "run"), "max_seq_length": 32, "global_batch_size": 2, "max_steps": 2,
            "micro_batch_size": 2, "recompute": True,  # fewer plans to look at
        },
        "hardware": {"ram": budget},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    code, peak = run_tool(["train", str(tmp_path / "job.yaml"), "--quiet"], tmp_path / "log.txt")
    assert code == 0, (tmp_path / "log.txt").read_text()
    assert peak <= budget, f"{peak:,} bytes of {budget:,}"
    head = json.loads((tmp_path / "run/HEAD.json").read_text())
    assert head["step"] == 2
    assert head["numerics"]["vocabulary_parts"] > 1
