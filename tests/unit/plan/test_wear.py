"""Wear: the bytes of a run, what a larger batch would write, and the refusal of what a disk cannot bear."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import make_situation

from packmule.errors import ConfigError
from packmule.plan.bounds import Sizes
from packmule.plan.candidates import candidates
from packmule.plan.predict import predict
from packmule.plan.situation import Situation
from packmule.plan.wear import MOST_SHARE, USUAL_REWRITES, refuse_wear, wear
from packmule.spec.plan import CheckpointPlan, Plan


def planned(rng: random.Random, **wishes: str) -> tuple[Situation, Plan]:
    """A random situation with a random plan of it that streams its state."""
    situation = make_situation(rng)
    asked = situation.wishes.model_copy(update={"state": "disk", **wishes})
    situation = replace(situation, wishes=asked)
    plan = rng.choice([plan for plan in candidates(situation) if plan.order == "breadth"])
    return situation, plan.model_copy(update={"predicted": predict(situation, plan)})


def with_disk(situation: Situation, **changes: object) -> Situation:
    disk = situation.hardware.disks[0].model_copy(update=changes)
    return replace(situation, hardware=situation.hardware.model_copy(update={"disks": (disk,)}))


def test_a_step_writes_at_least_its_state_and_snapshots_come_on_top(seed: int) -> None:
    rng = random.Random(seed)
    situation, plan = planned(rng)
    state = 3 * sum(Sizes.of(situation.shape, plan.numerics).planes)
    plan = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=None)})
    once = wear(situation, plan, 1).run_bytes
    assert once >= state
    steps, every = rng.randint(2, 500), rng.randint(1, 50)
    kept = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=every)})
    assert wear(situation, plan, steps).run_bytes == steps * once
    assert wear(situation, kept, steps).run_bytes == steps * once + steps // every * state


@pytest.mark.parametrize("inputs", ["ram", "disk"])
def test_twice_the_batch_writes_what_a_plan_for_it_says(inputs: str, seed: int) -> None:
    rng = random.Random(f"{seed} {inputs}")
    situation, plan = planned(rng, inputs=inputs)
    plan = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=None)})
    double = plan.model_copy(
        update={"numerics": plan.numerics.model_copy(update={"micro_rows": plan.numerics.micro_rows * 2})}
    )
    double = double.model_copy(update={"predicted": predict(situation, double)})
    steps = 2 * rng.randint(1, 50)
    assert wear(situation, plan, steps).doubled_bytes == wear(situation, double, steps // 2).run_bytes
    here, there = wear(situation, plan, steps), wear(situation, double, steps // 2)
    assert here.per_terabyte is not None and there.per_terabyte is not None
    tokens = steps * plan.numerics.rows * plan.numerics.max_seq_length
    assert here.per_terabyte * here.run_bytes == pytest.approx(tokens * 1e12)
    assert there.per_terabyte * there.run_bytes == pytest.approx(tokens * 1e12)


def test_the_rating_is_the_disks_or_its_size_many_times(seed: int) -> None:
    rng = random.Random(seed)
    situation, plan = planned(rng)
    sized = with_disk(situation, total_bytes=10**12)
    assert wear(sized, plan, 1).endurance_bytes == USUAL_REWRITES * 10**12 and wear(sized, plan, 1).assumed
    assert wear(situation, plan, 1).endurance_bytes == 0  # an old record does not know the size
    assert wear(with_disk(sized, filesystem="tmpfs"), plan, 1).share == 0
    rated = replace(sized, wishes=sized.wishes.model_copy(update={"tbw": 3 * 10**14}))
    found = wear(rated, plan, 7)
    assert (found.endurance_bytes, found.assumed) == (3 * 10**14, False)
    assert found.share == found.run_bytes / 3e14


def test_a_run_that_takes_much_of_a_disks_life_is_refused_with_what_writes_less(seed: int) -> None:
    situation, plan = planned(random.Random(seed), inputs="ram")
    plan = plan.model_copy(update={"checkpoint": CheckpointPlan(commit_steps=1, snapshot_steps=None)})
    written = wear(situation, plan, 1).run_bytes
    most = int(written * 1000 / MOST_SHARE) + 1
    rated = replace(situation, wishes=situation.wishes.model_copy(update={"tbw": most}))
    refuse_wear(rated, plan, 1000)
    exact = 4_000_000_000
    plan = plan.model_copy(
        update={
            "predicted": plan.predicted.model_copy(update={"disk_bytes_written_per_step": exact})  # type: ignore[union-attr]
        }
    )
    rated = replace(situation, wishes=situation.wishes.model_copy(update={"tbw": 20 * 10**12}))
    with pytest.raises(ConfigError) as caught:
        refuse_wear(rated, plan, 1000)
    assert str(caught.value) == (
        "The run would write 4 TB to the disk of /, 20 % of the 20 TB that it is rated for.\n"
        f"hint: --yes runs it all the same; the same rows in steps of twice as many (--global-batch-size "
        f"{2 * plan.numerics.rows}, half the steps) write 2 TB; more --ram may keep the state in memory; "
        "--disk names another disk"
    )


def test_what_is_spilled_is_what_placing_inputs_on_disk_adds(seed: int) -> None:
    situation, plan = planned(random.Random(seed), inputs="disk")
    near = plan.model_copy(update={"placement": plan.placement.model_copy(update={"inputs": "ram"})})
    there, here = plan.predicted, predict(situation, near)
    assert there is not None and here.disk_bytes_spilled_per_step == 0
    added = there.disk_bytes_written_per_step - here.disk_bytes_written_per_step
    assert there.disk_bytes_spilled_per_step == added
