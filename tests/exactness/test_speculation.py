"""Updates made before the clip factor is known: taken back where it is not one, to the same bits."""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from statistics import median

import pytest
from tests.exactness.runs import (
    Case,
    finish,
    make_case,
    make_plan,
    progress,
    step_engine,
    tiny_shape,
    watch,
)
from tests.fault.recording_disk import RecordingDisk

from packmule.engine.engine import Engine
from packmule.engine.executor import Stopped
from packmule.engine.program import Program
from packmule.graph.run import SPECULATING
from packmule.kernels.contract import Kernels
from packmule.spec.plan import Placement
from packmule.spec.timeline import Timeline

STEPS, RUN = 8, Path("/run")
CHOICES = {
    "weights made from the state": {"placement": Placement(state="disk", weights="state")},
    "all on disk": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "micro_rows": (1, 1),
        "snapshot_steps": 3,
    },
    "weights in RAM": {
        "placement": Placement(state="disk", weights="ram", gradients="disk"),
        "precision": "fp32",
        "optimizer": {"rule": "adalomo"},
    },
    "vocabulary in parts": {
        "placement": Placement(state="disk", weights="disk", gradients="disk"),
        "vocabulary_parts": 3,
    },
}


@pytest.fixture(params=CHOICES)
def case(request: pytest.FixtureRequest, seed: int, kernels: Kernels) -> Case:
    """A run in which about every other gradient is clipped."""
    plan = make_plan(
        update="on-fetch", speculate=True, steps=STEPS, schedule={"learning_rate": 1e-3}, chunk_bytes=16384,
        **CHOICES[request.param],
    )  # fmt: skip
    shape = tiny_shape(tied=random.Random(seed).random() < 0.5)

    def clipped(limit: float) -> Case:
        numerics = plan.numerics.model_copy(update={"clip": limit})
        return make_case(shape, plan.model_copy(update={"numerics": numerics}), STEPS, seed, kernels)

    limit = median(norm for _, norm in clipped(1e9).expected.trace)
    found = clipped(limit)
    assert {norm > limit for _, norm in found.expected.trace} == {True, False}
    return found


def speculate(engine: Engine, case: Case, rng: random.Random) -> list[tuple[float, float]]:
    """All steps, guessing at random whether the next gradient is clipped."""
    trace = []
    for step in range(case.steps):
        engine.expects_clip = rng.random() < 0.3
        trace.append(step_engine(engine, case.data, step))
    engine.settle(progress(case.plan, case.steps))
    engine.close()
    return trace


def test_whatever_is_guessed_the_bits_are_those_of_the_plain_loop(
    case: Case, kernels: Kernels, seed: int
) -> None:
    for guesses in range(2):
        disk = RecordingDisk()
        case.start(RUN, kernels, disk)
        engine, _ = case.open(RUN, kernels, disk)
        assert speculate(engine, case, random.Random(seed + guesses)) == case.expected.trace
        assert case.state(RUN, kernels, disk) == (case.steps, case.expected.images[-1])
        assert case.snapshots(RUN, kernels, disk) == case.kept(case.steps)


def test_a_step_is_foreseen_to_be_like_the_one_before(case: Case, kernels: Kernels) -> None:
    disk, names = RecordingDisk(), []

    def seen(name: str, program: Program, arguments: dict) -> Timeline:
        names.append(name)
        return program.run(**arguments)

    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    watch(engine, seen)
    limit = case.plan.numerics.clip or 0.0
    for step in range(case.steps):
        before = case.expected.trace[step - 1][1] if step else 1e9
        step_engine(engine, case.data, step)
        every, kept = case.plan.checkpoint.snapshot_steps or 99, names[-1].endswith("snapshot")
        free = (step + 1) % every != 0 and not kept
        assert names[-1].endswith(SPECULATING) == (free and before <= limit), step
        # What was right is durable, and nothing is left to do.
        validated = names[-1].endswith(SPECULATING) and case.expected.trace[step][1] <= limit
        assert engine.update_pending != validated
    engine.close()


def test_a_stop_at_any_task_leaves_a_whole_step(case: Case, kernels: Kernels, seed: int) -> None:
    rng, fresh = random.Random(seed), RecordingDisk()
    case.start(RUN, kernels, fresh)
    for _ in range(3):
        disk, stop = RecordingDisk(deepcopy(fresh.root)), rng.randrange(case.steps)
        engine, _ = case.open(RUN, kernels, disk)
        runs = [0]

        def cut(name: str, program: Program, arguments: dict) -> Timeline:
            runs[0] += 1  # noqa: B023
            if runs[0] == stop + 1:  # noqa: B023
                # Near the end more often: that is where updates are taken back.
                tasks = program.graph.tasks
                arguments["stop_after"] = rng.choice((rng.randrange(tasks - 1), tasks - rng.randint(2, 6)))
            return program.run(**arguments)

        watch(engine, cut)
        with pytest.raises(Stopped):
            speculate(engine, case, rng)
        step, image = case.state(RUN, kernels, disk)
        assert image == case.expected.images[step] and step >= stop - 1
        resumed, trace = finish(case, RUN, kernels, disk)
        assert (resumed, trace) == (step, case.expected.trace[step:])
        assert case.state(RUN, kernels, disk) == (case.steps, case.expected.images[-1])
