"""What a run cannot help: numbers that are not finite, memory that is not there."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import PLANS, STEPS, Base, compare, head_step, some, state_of

from packmule.errors import RunFailed
from packmule.train.messages import Request
from packmule.train.watch import explain_death, run_child


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


def test_a_loss_that_is_not_finite_is_never_committed(
    base: Base, tmp_path: Path, seed: int, long: bool
) -> None:
    for plan in some(PLANS, random.Random(seed), long):
        job = base.job(tmp_path / plan, plan, learning_rate="1e30", warmup_steps="0")
        job.run().refused(5, "not finite", "--max-grad-norm", "learning rate")
        assert head_step(job.out) <= 1  # the first update was made of finite numbers
        state_of(job.out)
        job.run().refused(5, "not finite")


def test_weights_that_are_not_finite_are_told_at_the_first_step(base: Base, tmp_path: Path) -> None:
    folder = base.copy(tmp_path / "copy", "on-backward").out / "final"
    poison(folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    flags = {"model": str(folder), "model.init": "pretrained"}
    job = base.job(tmp_path / "run", "on-backward", **flags)
    result = job.run()
    result.refused(5, "not finite")
    assert head_step(job.out) == 0


def poison(path: Path, tensor: str) -> None:
    """Put a NaN in one tensor of a safetensors file."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[tensor]
    assert entry["dtype"] == "F32"
    at = 8 + length + entry["data_offsets"][0] + 4 * 5
    data[at : at + 4] = np.float32("nan").tobytes()
    path.write_bytes(data)


def test_a_budget_too_small_behind_the_planner_fails_in_words(base: Base, tmp_path: Path) -> None:
    plan = "on-backward"
    job = base.partial(tmp_path / "run", plan)
    before = head_step(job.out)
    failure, events = run_with(job.out, job.variables, ram_bytes=0)
    assert failure is not None and failure.exit_code == 5
    assert failure.cause.startswith("An allocation failed at the budget: "), failure.cause
    assert "--ram" in failure.hint
    assert not [event for event in events if event["event"] == "done"]
    assert head_step(job.out) >= before
    state_of(job.out)
    assert job.run().code == 0
    compare(job.out, base.expected(plan))


def run_with(
    out: Path, variables: Mapping[str, str], ram_bytes: int
) -> tuple[RunFailed | None, list[dict[str, Any]]]:
    """The training child over a run's folder, with another budget than its plan was made for."""
    request = Request(
        work="train",
        folder=str(out),
        state=str(out),
        data=str(out / "data"),
        ram_bytes=ram_bytes,
        total_steps=STEPS,
        mean_length=20.0,
    )
    events: list[dict[str, Any]] = []
    try:
        run_child("packmule.train.child", request.model_dump_json(), events.append, variables)
    except RunFailed as error:
        return error, events
    return None, events


def test_sigkill_is_called_out_of_memory_only_where_the_kernel_counted_it() -> None:
    assert "kill -9" in explain_death(-9, "", 0).cause
    assert "out-of-memory killer" in explain_death(-9, "", 1).cause
    assert explain_death(-9, "", 1).exit_code == 5
    assert explain_death(-15, "").exit_code == 143
    aborted = explain_death(-6, "terminate called after throwing std::bad_alloc\n")
    assert aborted.exit_code == 5 and "SIGABRT" in aborted.cause and "bad_alloc" in aborted.cause
