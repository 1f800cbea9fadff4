"""What a plan says of snapshots and of commits in the background."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import make_situation

from packmule.plan.bounds import Sizes
from packmule.plan.candidates import candidates
from packmule.plan.explain import decisions, times
from packmule.plan.predict import graphs, predict
from packmule.spec.plan import CheckpointPlan


@pytest.mark.parametrize("state", ["ram", "disk"])
def test_a_snapshot_adds_the_bytes_of_the_state_and_their_time_at_most(state: str, seed: int) -> None:
    rng = random.Random(f"{seed} {state}")
    situation = make_situation(rng)
    asked = situation.wishes.model_copy(update={"state": state})
    situation = replace(situation, wishes=asked)
    plan = rng.choice(list(candidates(situation)))
    plan = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=None)})
    every = rng.randint(2, 40)
    kept = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=every)})
    without, found = predict(situation, plan), predict(situation, kept)
    size = sum(Sizes.of(situation.shape, plan.numerics).state)
    assert (without.snapshot_bytes, without.snapshot_seconds) == (0, 0)
    assert found.snapshot_bytes == size
    # At most the time of its writes, had nothing else been under way.
    tasks = graphs(situation, kept)["step, commit, snapshot"]().tasks
    assert found.snapshot_seconds <= situation.costs.write(size) + tasks * situation.costs.task_seconds + 1
    # What it adds is apart from a step's own prediction.
    for name in ("step_seconds", "disk_seconds", "disk_bytes_written_per_step", "disk_bytes_read_per_step"):
        assert getattr(found, name) == getattr(without, name), name
    assert found.peak_ram_bytes >= without.peak_ram_bytes
    rows = dict(times(situation, kept.model_copy(update={"predicted": found}), 3 * every))
    assert f"every {every} steps" in rows["full copy"]
    assert "full copy" not in dict(times(situation, plan.model_copy(update={"predicted": without}), 10))


@pytest.mark.parametrize(("state", "lost"), [("ram", "2 steps"), ("disk", "the step under way")])
def test_a_crash_loses_the_step_that_is_being_stored(state: str, lost: str, seed: int) -> None:
    situation = make_situation(random.Random(seed))
    asked = situation.wishes.model_copy(update={"state": state, "update": "after-backward"})
    plan = next(iter(candidates(replace(situation, wishes=asked))))
    plan = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=None)})
    assert f"a crash loses at most {lost}" in dict(decisions(situation.shape, plan))["commit"]
