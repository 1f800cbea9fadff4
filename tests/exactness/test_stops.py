"""A run that stops and goes on is the run that did not: after every step, and under other plans."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.exactness.runs import Case, make_case, make_plan, progress, step_engine, tiny_shape
from tests.fault.recording_disk import RecordingDisk

from packmule.kernels.contract import Kernels
from packmule.optim.schedules import rates
from packmule.plan.candidates import allowed
from packmule.spec.growth import Growth
from packmule.spec.plan import Io, Placement, Plan
from packmule.tiers.disk import Disk, PosixDisk

STEPS = 20

PLANS = {
    "ram": {},
    "ram, commit every 3": {"commit_steps": 3},
    "ram, on-fetch, commit every 3": {"commit_steps": 3, "update": "on-fetch"},
    "disk, on-fetch": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "update": "on-fetch",
    },
    "disk, on-backward": {
        "placement": Placement(state="disk", weights="state"),
        "update": "on-backward",
        "clip": None,
        "precision": "fp32",
    },
    "disk, after-backward, commit every 3": {
        "placement": Placement(state="disk", weights="ram", gradients="disk"),
        "commit_steps": 3,
    },
    "ram, wsd, embedding without decay": {
        "schedule": {"kind": "wsd", "decay_steps": 6, "decay_shape": "sqrt", "minimum": 1e-4},
        "optimizer": {"decay_embedding": False},
    },
    "disk, on-fetch, batch warm-up, linear scaling": {
        "placement": Placement(state="disk", weights="ram", gradients="disk"),
        "update": "on-fetch",
        "micro_rows": (2, 1, 1),
        "growth": Growth(start_rows=1, steps=11),
        "schedule": {"kind": "linear", "scaling": "linear", "base_rows": 2},
    },
    "disk, depth, batch warm-up, root scaling, all decays": {
        "placement": Placement(state="disk", weights="state"),
        "order": "depth",
        "micro_rows": (1, 2),
        "growth": Growth(start_rows=2, steps=5),
        "schedule": {"kind": "constant", "scaling": "sqrt"},
        "optimizer": {"decay_on": "all"},
        "precision": "fp32",
    },
}

Point = tuple[float, float, float, int]
"""Loss, gradient norm, learning rate, checksum of the rows."""


def point(case: Case, step: int, measured: tuple[float, float]) -> Point:
    """One step's trace: what came out and what went in."""
    numerics = case.plan.numerics
    rows = b"".join(batch.ids.tobytes() for batch in case.data.batches(step, numerics))
    return (*measured, rates(numerics, step).learning_rate, zlib.crc32(rows))


def plain_points(case: Case) -> list[Point]:
    return [point(case, step, measured) for step, measured in enumerate(case.expected.trace)]


@pytest.fixture(params=PLANS)
def case(request: pytest.FixtureRequest, seed: int, kernels: Kernels) -> Case:
    plan = make_plan(**{"steps": STEPS, "micro_rows": (1, 1), **PLANS[request.param]})
    return make_case(tiny_shape(tied=True), plan, STEPS, seed, kernels)


@pytest.fixture
def place(tmp_path: Path, long: bool) -> tuple[Path, Disk]:
    """Where runs lie: in memory, or on the real disk with `--long`."""
    return (tmp_path / "run", PosixDisk()) if long else (Path("/run"), RecordingDisk())


def test_a_stop_after_every_step_changes_nothing(
    case: Case, place: tuple[Path, Disk], kernels: Kernels
) -> None:
    folder, disk = place
    case.start(folder, kernels, disk)
    points = []
    for _ in range(STEPS):
        engine, step = case.open(folder, kernels, disk)
        points.append(point(case, step, step_engine(engine, case.data, step)))
        engine.settle(progress(case.plan, step + 1))
        engine.close()
        assert case.state(folder, kernels, disk) == (step + 1, case.expected.images[step + 1])
    assert points == plain_points(case)


def test_a_kill_after_every_step_loses_only_what_was_not_committed(
    case: Case, place: tuple[Path, Disk], kernels: Kernels
) -> None:
    folder, disk = place
    case.start(folder, kernels, disk)
    expected = plain_points(case)
    every, late = case.plan.checkpoint.commit_steps, case.plan.commits_late
    for last in range(1, STEPS + 1):
        engine, first = case.open(folder, kernels, disk)
        for step in range(first, last):
            assert point(case, step, step_engine(engine, case.data, step)) == expected[step]
        engine.close()  # what was pending is lost, as are planes in RAM
        head, image = case.state(folder, kernels, disk)
        # A step may be committed in the graph of the next, if this process ran both.
        done = last - 1 if late else last
        assert head == max(first, done - done % every)
        assert image == case.expected.images[head]
    assert STEPS - head <= every


def test_a_run_may_change_its_plan_at_every_stop(kernels: Kernels, seed: int, long: bool) -> None:
    """Same numerics, another placement, order, recomputation, update mode, prefetch depth and
    chunk size at each resume."""
    rng = random.Random(seed)
    for clip in (None, 1.0):
        base = make_plan(steps=STEPS, micro_rows=(2, 1), clip=clip)
        case = make_case(tiny_shape(tied=rng.random() < 0.5), base, STEPS, seed, kernels)
        for _ in range(20 if long else 1):
            folder, disk = Path("/run"), RecordingDisk()
            case.start(folder, kernels, disk)
            head = 0
            while head < STEPS:
                plan = another_plan(base, rng)
                now = replace(case, plan=plan)
                engine, head = now.open(folder, kernels, disk)
                stop = min(STEPS, head + rng.choice((1, 1, 2)))
                for step in range(head, stop):
                    assert step_engine(engine, case.data, step) == case.expected.trace[step], plan
                engine.settle(progress(plan, stop))
                engine.close()
                assert now.state(folder, kernels, disk) == (stop, case.expected.images[stop]), plan
                head = stop


def another_plan(plan: Plan, rng: random.Random) -> Plan:
    """A random plan of the same numerics."""
    while True:
        placement = Placement(
            state=rng.choice(("ram", "disk")),
            weights=rng.choice(("state", "ram", "disk")),
            gradients=rng.choice(("ram", "disk")),
            inputs=rng.choice(("ram", "disk")),
            kept_weights=rng.choice((0, 0, 1, 3)),
            kept_state=rng.choice((0, 0, 1, 3)),
        )
        found = plan.model_copy(
            update={
                "placement": placement,
                "order": rng.choice(("breadth", "depth")),
                "recompute": tuple(rng.random() < 0.5 for _ in plan.recompute),
                "update": rng.choice(("after-backward", "on-backward", "on-fetch")),
                "speculate": rng.random() < 0.3,
                "io": Io(
                    prefetch=rng.choice((0, 1, 2)),
                    chunk_bytes=rng.choice((4096, 8192, 65536)),
                    read_ahead=rng.choice((1, 2, 5)),
                ),
            }
        )
        if allowed(found) and not (found.update == "on-backward" and placement.gradients == "disk"):
            return found
