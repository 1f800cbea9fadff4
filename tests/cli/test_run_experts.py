"""The commands on a model with experts, from a config.json to a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from typing import Any

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


def model_of(bench: Bench, kind: str, name: str, **changes: Any) -> str:
    """A folder with a config.json of that family."""
    folder = bench.folder / name
    shutil.copytree(bench.folder / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config = {**config, "model_type": kind, **SIZES[kind], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return name


def steps_of(bench: Bench, run: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (bench.folder / run / "log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "train/loss" in entry]


def test_a_model_with_experts_is_trained_evaluated_continued_and_loaded(bench: Bench, seed: int) -> None:
    """One of the two families: every command is a process."""
    kind = sorted(SIZES)[seed % 2]
    path = bench.job(f"{kind}-run", model__path=model_of(bench, kind, kind), train__max_steps=3)
    bench.run("train", path.name).succeeded()
    run = path.with_suffix("").name
    steps = steps_of(bench, run)
    # As many as are chosen where all experts get the same; it cannot be more than all of them.
    assert len(steps) == 3 and all(1.5 < entry["train/router_aux_loss"] <= 4 for entry in steps)
    assert bench.run("eval", run, "--json").succeeded().json
    bench.run("generate", run, "--prompt", "the mule", "--tokens", "4").succeeded()
    model = transformers.AutoModelForCausalLM.from_pretrained(bench.folder / run / "final")
    assert type(model).__name__ in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_a_job_balances_experts_otherwise_than_their_config(bench: Bench, seed: int) -> None:
    kind = sorted(SIZES)[(seed + 1) % 2]
    bench.job("asked", model__path=model_of(bench, kind, "own"), train__max_steps=2)
    bench.job(
        "own_factor", train__max_steps=2, model__path=model_of(bench, kind, "f", router_aux_loss_coef=0.7)
    )
    words = ("train", "asked.yaml", "--router-aux-loss-coef")
    bench.run(*words, "0.7").succeeded()
    bench.run("train", "own_factor.yaml").succeeded()
    asked, own = (
        [{key: value for key, value in step.items() if not key.endswith("seconds")} for step in steps]
        for steps in (steps_of(bench, "asked"), steps_of(bench, "own_factor"))
    )
    assert asked == own
    head = json.loads((bench.folder / "asked" / "HEAD.json").read_text())
    assert head["numerics"]["router_aux_loss_coef"] == 0.7
    # and goes on without any
    said = "`train.router_aux_loss_coef` was 0.7, is 0.0"
    assert said in bench.run(*words, "0", "--max-steps", "3").succeeded().out
    assert ["train/router_aux_loss" in step for step in steps_of(bench, "asked")] == [True, True, False]


def test_balancing_a_model_without_experts_is_refused(bench: Bench) -> None:
    for command in ("plan", "train"):
        message = bench.run(command, bench.job("dense").name, "--moe-aux-loss-coef", "0.1").refused()
        assert (
            "`train.router_aux_loss_coef` = 0.1 balances experts, and the model (llama) has none." in message
        )
    assert not (bench.folder / "dense").exists()
