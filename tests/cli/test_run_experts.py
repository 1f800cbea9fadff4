"""The commands on a model with experts, from a config.json to a folder that transformers loads."""

from __future__ import annotations

import json
import shutil

import torch
import transformers
from tests.cli.bench import Bench

SIZES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0],
        "norm_topk_prob": True, "head_dim": 8,
    },
}  # fmt: skip


def test_a_model_with_experts_is_trained_evaluated_continued_and_loaded(bench: Bench, seed: int) -> None:
    """One of the two families: every command is a process."""
    kind = sorted(SIZES)[seed % 2]
    folder = bench.folder / kind
    shutil.copytree(bench.folder / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, **SIZES[kind]}))
    path = bench.job(f"{kind}-run", model__path=kind, train__max_steps=3)
    bench.run("train", path.name).succeeded()
    run = path.with_suffix("").name
    entries = [json.loads(line) for line in (bench.folder / run / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "train/loss" in entry]
    # As many as are chosen where all experts get the same; it cannot be more than all of them.
    assert len(steps) == 3 and all(1.5 < entry["train/router_aux_loss"] <= 4 for entry in steps)
    assert bench.run("eval", run, "--json").succeeded().json
    bench.run("generate", run, "--prompt", "the mule", "--tokens", "4").succeeded()
    model = transformers.AutoModelForCausalLM.from_pretrained(bench.folder / run / "final")
    assert type(model).__name__ in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
