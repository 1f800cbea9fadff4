"""A run through the command line whose budget is so much above the processes' baselines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.memory_accuracy import run_tool, write_model, write_texts

from packmule.probe import load
from packmule.spec.environment import read_environment

STEPS = 2


def train_within(
    folder: Path, config: dict[str, Any], above: int, texts: tuple[int, int], train: dict, hardware: dict
) -> Path:
    """Train a model of random weights for two steps; its run folder.

    Args:
        config: a Hugging Face config.json.
        above: bytes of the budget above the baselines, which the peak must keep to.
        texts: how many, and how long.
        train, hardware: the rest of these sections of the job.
    """
    write_model(folder / "model", config)
    write_texts(folder / "text.jsonl", random.Random(0), *texts)
    probed = load(read_environment().cache / "probe.json", folder)
    budget = probed.parent_baseline_bytes + probed.child_baseline_bytes + above
    job = {
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"path": str(folder / "text.jsonl"), "val_size": 0},
        "train": {"output_dir": str(folder / "run"), "max_steps": STEPS, "global_batch_size": 2, **train},
        "hardware": {"ram": budget, **hardware},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    code, peak = run_tool(["train", str(folder / "job.yaml"), "--quiet"], folder / "log.txt")
    assert code == 0, (folder / "log.txt").read_text()
    assert peak <= budget, f"{peak:,} bytes of {budget:,}"
    return folder / "run"
