"""A run of the first format is read for ever by every command that reads runs.

tests/frozen/train-v1 was made by `packmule train` of version 0.1: three steps of a tiny model and a
snapshot.
From the first release on it is never written again; exported.safetensors is what that version exported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.bench import Bench

from packmule.spec.hardware import Hardware
from packmule.spec.job import load_job
from packmule.spec.plan import Plan

FROZEN = Path(__file__).parents[1] / "frozen" / "train-v1"


@pytest.fixture(scope="module")
def frozen(bench: Bench) -> Path:
    """A copy beside the bench's model."""
    return Path(shutil.copytree(FROZEN, bench.folder / "frozen"))


def test_its_small_files_are_valid() -> None:
    job = load_job((FROZEN / "config.yaml").read_text(), "config.yaml")
    assert (job.train.max_steps, job.train.sample_prompt) == (3, "the mule")
    plan = Plan.parse_json((FROZEN / "plan.json").read_text(), "plan.json")
    assert plan.numerics.max_seq_length == job.train.max_seq_length
    assert Hardware.parse_json((FROZEN / "probe.json").read_text(), "probe.json").threads == 1
    report = json.loads((FROZEN / "report.json").read_text())
    assert report["format"] == 1
    assert set(report["terms"]) <= set(plan.predicted.model_dump())  # type: ignore[union-attr]


def test_it_is_verified_and_described(bench: Bench, frozen: Path) -> None:
    found = bench.run("verify", frozen, "--json").succeeded().json
    assert {name: entry["step"] for name, entry in found.items()} == {"frozen": 3, "checkpoint-2": 2}
    described = bench.run("info", frozen, "--json").succeeded().json
    assert (described["step"], described["total steps"], described["parameters"]) == (3, 3, 6768)
    assert list(described["held-out perplexity"]) == ["step 0", "step 2", "step 3"]


def test_its_export_has_the_same_bytes(bench: Bench, frozen: Path) -> None:
    bench.run("export", frozen, "thawed", "--dtype", "float32").succeeded()
    exported = (bench.folder / "thawed" / "model.safetensors").read_bytes()
    assert exported == (FROZEN / "exported.safetensors").read_bytes()


def test_its_evaluation_still_gives_what_was_logged(bench: Bench, frozen: Path) -> None:
    log = [json.loads(line) for line in (FROZEN / "log.jsonl").read_text().splitlines()]
    logged = next(entry for entry in log if entry["step"] == 3 and "eval/loss" in entry)
    found = bench.run("eval", frozen, "--json").succeeded().json
    assert found["loss"] == pytest.approx(logged["eval/loss"], rel=1e-5)
    assert found["targets"] == logged["eval/targets"]
