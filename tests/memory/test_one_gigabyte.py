"""1 GB of training state in 250 MB: everything on disk, through the command line."""

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
    write_model(tmp_path / "model", CONFIG)
    write_texts(tmp_path / "text.jsonl", random.Random(0), 2000, 64)
    hardware = load(read_environment().cache / "probe.json", tmp_path)
    budget = hardware.parent_baseline_bytes + hardware.child_baseline_bytes + ABOVE_BASELINE
    job = {
        "model": {"path": str(tmp_path / "model"), "init": "random"},
        "data": {"path": str(tmp_path / "text.jsonl"), "val_size": 0},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_seq_length": 64,
            "global_batch_size": 2,
            "max_steps": 2,
            "precision": "fp32",
        },
        "hardware": {"ram": budget, "state": "disk", "gradients": "disk", "inputs": "disk"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    code, peak = run_tool(["train", str(tmp_path / "job.yaml"), "--quiet"], tmp_path / "log.txt")
    assert code == 0, (tmp_path / "log.txt").read_text()
    assert peak <= budget, f"{peak:,} bytes of {budget:,}"
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert steps[-1] == 2
