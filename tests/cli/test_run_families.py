"""A model of any family from the command line: drawn, trained, exported, loaded elsewhere, trained on."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest
import torch
import transformers
from tests.cli.bench import Bench
from tests.parity.architectures import ARCHITECTURES

ROWS = {row.name: row for row in ARCHITECTURES}


def test_an_architecture_is_trained_exported_and_trained_on(bench: Bench, seed: int, long: bool) -> None:
    """One row by chance; with `--long` all of them."""
    rng = random.Random(seed)
    for name in ROWS if long else rng.sample(list(ROWS), 1):
        short = name.replace(" ", "_").replace(".", "_")
        config = ROWS[name].config(rng)
        folder = bench.folder / f"{short}_model"
        shutil.copytree(bench.folder / "model", folder)
        known = json.loads((folder / "config.json").read_text())
        ids = {key: known[key] for key in ("vocab_size", "eos_token_id")}
        (folder / "config.json").write_text(json.dumps({**config, **ids}))
        job = bench.job(f"{short}_run", model__path=folder.name, data__val_size=0.2)
        run = bench.run("train", job.name, "--json").succeeded()
        losses = [event["loss"] for event in run.named("step")]
        assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses), name
        final = bench.folder / f"{short}_run" / "final"
        # transformers' grouped products do not take every width
        eager = {"experts_implementation": "eager"} if "num_experts_per_tok" in config else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32, **eager)
        with torch.no_grad():
            assert bool(torch.isfinite(model(torch.arange(20)[None] % 50).logits).all()), name
        more = bench.job(f"{short}_more", model__path=f"{short}_run/final", model__init="pretrained")
        again = bench.run("train", more.name, "--json").succeeded()
        # The exported weights are bfloat16, so the loss goes on near where it was, not at the start.
        assert again.named("step")[0]["loss"] == pytest.approx(losses[-1], abs=0.7), name
