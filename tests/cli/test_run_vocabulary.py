"""A tied vocabulary in parts through the commands: killed, resumed, looked at, and begun from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.bench import MAIN, Bench
from tests.fault.processes import Running, gone

STEPS = 6

WIDE = {"hidden_size": 512, "vocab_size": 8300, "num_hidden_layers": 1}
"""Changes of the tiny model. Its table is a little larger than the 16 MiB that one part may be."""

CHANGES = {
    "model__path": "large_words", "data__val_size": 6, "train__max_steps": STEPS,
    "train__micro_batch_size": 2, "train__recompute": True, "train__eval_steps": STEPS,
    # Updates during backward leave gradients on disk for nothing but a tied vocabulary in parts.
    "train__update": "on-backward", "hardware__state": "disk", "hardware__gradients": "disk",
}  # fmt: skip


def head(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "HEAD.json").read_text())
    return found


def logged(run: Path, metric: str) -> dict[int, float]:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {line["step"]: line[metric] for line in lines if metric in line}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """A run that nothing interrupts."""
    wide = bench.folder / "large_words"
    shutil.copytree(bench.folder / "model", wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | WIDE))
    job = bench.job("parted", **CHANGES)
    bench.run("train", job.name).succeeded()
    run = bench.folder / "parted"
    names = [block["name"] for block in head(run)["layout"]["blocks"]]
    assert names == ["embed0", "embed1", "layer0", "head"]
    return run


def killed(bench: Bench, name: str, step: int) -> Path:
    """The same job in another folder, both of its processes killed when it tells of a step."""
    words = ("train", "parted.yaml", "--output-dir", name, "--json")
    with Running([sys.executable, "-c", MAIN, *words], bench.variables(), bench.folder) as running:
        assert running.until(lambda event: event["event"] == "step" and event["step"] == step)
        children = running.children()
        for pid in (*children, running.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert running.end().code == 128 + signal.SIGKILL
        assert children and all(gone(pid, 30) for pid in children)
    return bench.folder / name


def test_a_killed_run_ends_in_the_bits_of_one_that_was_not(bench: Bench, whole: Path) -> None:
    run = killed(bench, "parted_killed", step=2)
    step = head(run)["step"]
    assert 2 <= step < STEPS and head(run)["numerics"]["vocabulary_parts"] == 2
    done = bench.run("train", "parted.yaml", "--output-dir", run.name).succeeded()
    assert f"resuming after step {step} of {STEPS}" in done.out
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert logged(run, metric) == logged(whole, metric)
    assert weights(run / "final") == weights(whole / "final")
    assert bench.run("verify", run.name, "--json").succeeded().json[run.name]["step"] == STEPS


def test_eval_and_export_see_one_table(bench: Bench, whole: Path) -> None:
    found = bench.run("eval", whole.name, "--rows", "6", "--json").succeeded().json
    assert found["loss"] == pytest.approx(logged(whole, "eval/loss")[STEPS], rel=1e-6)
    bench.run("export", whole.name, "parted_export", "--dtype", "float32").succeeded()
    assert weights(bench.folder / "parted_export") == weights(whole / "final")


def test_a_run_without_the_cut_begins_from_one_with_it(bench: Bench, whole: Path) -> None:
    changes = CHANGES | {
        "model__path": whole.name, "model__init": "pretrained", "train__max_steps": 1, "train__eval_steps": 1,
        "train__update": "after-backward", "hardware__gradients": "ram", "optim__learning_rate": 0.0,
    }  # fmt: skip
    bench.run("train", bench.job("unparted", **changes).name).succeeded()
    run = bench.folder / "unparted"
    assert head(run)["numerics"]["vocabulary_parts"] == 1
    # With a rate of 0 the weights are those it began with.
    assert weights(run / "final") == weights(whole / "final")
    # Sums go through the whole vocabulary at once instead of part by part.
    assert logged(run, "eval/loss")[0] == pytest.approx(logged(whole, "eval/loss")[STEPS], rel=1e-6)
