"""An allocation that fails in spite of the plan: the step is redone in smaller micro-batches, and the
mathematics stays: same rows a step, same weights, from the last commit, told and recorded."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import PLANS, STEPS, Base, Job, log_of, some, state_of

from packmule.train.launch import halved

INJECT = Path(__file__).parent / "inject"
FAILS_AT = 5


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


def spoil(monkeypatch: pytest.MonkeyPatch, **order: Any) -> None:
    """Have the children started from now on run out of memory."""
    rest = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(INJECT), rest))))
    monkeypatch.setenv("OUT_OF_MEMORY", json.dumps({"step": FAILS_AT, **order}))


def changed(job: Job) -> list[tuple[int, str]]:
    """(step, sentence) of what the log says was changed."""
    found = [dict(entry) for entry in log_of(job.out)]
    return [(entry["step"], line) for entry in found if "changed" in entry for line in entry["changed"]]


def micro_rows(job: Job) -> list[int]:
    return list(json.loads((job.out / "HEAD.json").read_text())["numerics"]["micro_rows"])


def losses(job: Job) -> list[tuple[int, float]]:
    found = [dict(entry) for entry in log_of(job.out)]
    return [(entry["step"], entry["train/loss"]) for entry in found if "train/loss" in entry]


@pytest.mark.parametrize("how", ["error", "limit", "abort"])
def test_the_step_is_redone_in_halves_and_ends_as_a_run_that_was_asked_to(
    how: str, base: Base, tmp_path: Path, seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in some(PLANS, random.Random(f"{seed} {how}"), long):
        whole = base.path / f"whole {plan}"
        flags = {
            "save_steps": "1",
            "save_total_limit": str(STEPS),
            "val_size": "0",
            "train.sample_prompt": "",
        }
        if not (whole / "report.json").exists():
            assert base.job(whole, plan, **flags).run().code == 0
        job = base.job(tmp_path / f"{plan} {how}", plan, **flags)
        with monkeypatch.context() as patch:
            spoil(patch, how=how, rows=1)
            result = job.run()
        assert result.code == 0, result.err
        (note,) = [e["text"] for e in result.named("note") if "micro-batches" in e["text"]]
        assert "Going on in micro-batches of 1+1+1+1 rows instead of 2+2" in note
        ((at, line),) = changed(job)
        assert line == note
        assert micro_rows(job) == [1, 1, 1, 1]
        assert json.loads((job.out / "plan.json").read_text())["numerics"]["micro_rows"] == [1, 1, 1, 1]
        # Nothing is lost where no update had begun; else as much as a kill loses.
        lost = FAILS_AT - 1 - at
        assert lost == 0 if (plan == "ram" and how != "abort") else 0 <= lost <= 5, (plan, how, at)

        begin = {"resume": str(whole / f"checkpoint-{at}")} if at else {}
        asked = base.job(tmp_path / f"{plan} {how} asked", plan, **flags, **begin, micro_batch_size="1")
        assert replace(asked, switches=("--renumber",)).run().code == 0
        assert losses(job) == losses(asked)
        assert [step for step, _ in losses(job)] == list(range(1, STEPS + 1))
        assert state_of(job.out) == state_of(asked.out)
        uninterrupted = dict(losses(base.job(whole, plan)))
        assert dict(losses(job)) == pytest.approx(uninterrupted, rel=1e-3)


def test_rows_that_are_one_at_a_time_already_end_the_run_with_nothing_lost(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = base.job(tmp_path / "one", "on-backward")
    with monkeypatch.context() as patch:
        spoil(patch, how="error", rows=0)
        result = job.run()
    message = result.refused(
        5, "Rows are computed one at a time already", "--ram 1.1GB", "last commit is kept"
    )
    assert "Traceback" not in message
    steps = [step for step, _ in losses(job)]
    assert steps == list(range(1, len(steps) + 1))
    done = job.run()  # memory is there again
    assert done.code == 0, done.err
    assert [step for step, _ in losses(job)] == list(range(1, STEPS + 1))
    assert micro_rows(job) == [1, 1, 1, 1]


def test_halves_keep_every_row_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        micro = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 5)))
        assert sum(halved(micro)) == sum(micro)
        assert max(halved(micro)) == (max(micro) + 1) // 2
        assert min(halved(micro)) >= 1
