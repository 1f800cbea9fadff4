"""The engine may be stopped after any task of any graph, its memory lost: the run goes on to the
same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
from tests.exactness.runs import (
    BADAM,
    COSTS,
    HIFT,
    Case,
    finish,
    keeps,
    make_case,
    make_plan,
    progress,
    run_steps,
    step_engine,
    tiny_shape,
    watch,
)
from tests.fault.recording_disk import RecordingDisk

from packmule.engine.bodies import BODIES
from packmule.engine.engine import Engine
from packmule.engine.executor import Stopped
from packmule.engine.program import Program, Task
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import TaskKind
from packmule.graph.model import PlannedModel
from packmule.graph.run import SNAPSHOT, SPECULATING
from packmule.graph.training import build_step
from packmule.kernels.contract import Kernels
from packmule.spec.plan import Placement
from packmule.spec.timeline import Timeline

STEPS = 3
LAYERS = 4
SAMPLED = 10
"""Stops per plan without `--long`."""

RUN = Path("/run")

PLANS = {
    "ram": {"commit_steps": 2, "snapshot_steps": 1, "precision": "fp32", "recompute": (False,) * LAYERS},
    "ram, on-backward": {
        "placement": Placement(state="ram", weights="state", inputs="disk"),
        "update": "on-backward",
        "clip": None,
        "snapshot_steps": 2,
        "recompute": (True,) * LAYERS,
    },
    "disk, on-fetch": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "update": "on-fetch",
        "recompute": (True,) * LAYERS,
        "snapshot_steps": 1,
        "chunk_bytes": 16384,
    },
    "disk, on-fetch, speculating": {
        "placement": Placement(state="disk", weights="disk", gradients="disk"),
        "update": "on-fetch",
        "speculate": True,
        "clip": 1e-3,
        "recompute": (True, False, True, False),
        "chunk_bytes": 16384,
    },
    "disk, on-backward": {
        "placement": Placement(state="disk", weights="state"),
        "update": "on-backward",
        "clip": None,
        "recompute": (True, False, True, False),
        "snapshot_steps": 2,
        "chunk_bytes": 16384,
    },
    "depth": {
        "placement": Placement(state="disk", weights="ram", inputs="disk"),
        "order": "depth",
        "recompute": (True,) * LAYERS,
        "prefetch": 2,
        "chunk_bytes": 16384,
    },
    "lomo, two passes": {
        "placement": Placement(state="disk", weights="state", inputs="disk"),
        "update": "on-backward",
        "recompute": (False, True, False, True),
        "optimizer": {"rule": "lomo"},
        "chunk_bytes": 16384,
    },
    "disk, on-fetch, vocabulary in parts, some kept": {
        "placement": Placement(state="disk", weights="state", gradients="disk", kept_weights=3, kept_state=2),
        "update": "on-fetch",
        "snapshot_steps": 2,
        "recompute": (True,) * LAYERS,
        "chunk_bytes": 16384,
        "vocabulary_parts": 3,
    },
    "disk, on-backward, vocabulary in parts": {
        "placement": Placement(state="disk", weights="disk", gradients="disk"),
        "update": "on-backward",
        "clip": None,
        "recompute": (True,) * LAYERS,
        "chunk_bytes": 16384,
        "vocabulary_parts": 2,
    },
    "ram, vocabulary in parts": {
        "placement": Placement(state="ram", weights="state", gradients="disk"),
        "commit_steps": 2,
        "snapshot_steps": 2,
        "recompute": (True,) * LAYERS,
        "vocabulary_parts": 3,
    },
    "adalomo, two passes, some kept": {
        "placement": Placement(state="disk", weights="state", kept_state=2),
        "update": "on-backward",
        "snapshot_steps": 2,
        "recompute": (True,) * LAYERS,
        "optimizer": {"rule": "adalomo"},
        "chunk_bytes": 16384,
    },
    "hift": {
        "placement": Placement(state="ram", weights="state"),
        "update": "on-backward",
        "clip": None,
        "turns": HIFT,
        "snapshot_steps": 2,
        "recompute": (True,) * LAYERS,
    },
    "badam": {
        "placement": Placement(state="disk", weights="ram", inputs="disk"),
        "turns": BADAM,
        "recompute": (True,) * LAYERS,
        "chunk_bytes": 16384,
    },
    "device, disk, on-backward": {
        "placement": Placement(state="disk", weights="state", inputs="disk", device_weights=3),
        "update": "on-backward",
        "clip": None,
        "recompute": (True, False, True, False),
        "chunk_bytes": 16384,
        "device": True,
    },
    "device, ram, on-fetch": {
        "placement": Placement(state="ram", weights="ram", inputs="ram", device_weights=1),
        "update": "on-fetch",
        "recompute": (True,) * LAYERS,
        "device": True,
    },
    "ram, on-fetch": {
        "placement": Placement(state="ram", weights="ram", gradients="disk"),
        "update": "on-fetch",
        "commit_steps": 2,
        "recompute": (True,) * LAYERS,
    },
}


class Watcher:
    """Sees every execution of an engine and stops one of them after a task."""

    def __init__(self, execution: int = -1, task: int = -1) -> None:
        self.executions: list[tuple[str, int]] = []
        self._execution, self._task = execution, task

    def attach(self, engine: Engine) -> None:
        watch(engine, self._run)

    def _run(self, name: str, program: Program, arguments: dict) -> Timeline:
        self.executions.append((name, program.graph.tasks))
        if len(self.executions) - 1 == self._execution:
            arguments = {**arguments, "stop_after": self._task}
        return program.run(**arguments)


@pytest.fixture(params=PLANS)
def case(request: pytest.FixtureRequest, seed: int, kernels: Kernels) -> Case:
    plan = make_plan(steps=STEPS, micro_rows=(1, 1), **PLANS[request.param])
    tied = plan.numerics.vocabulary_parts > 1
    return make_case(tiny_shape(tied, layers=LAYERS), plan, STEPS, seed, kernels)


def run(case: Case, watcher: Watcher, disk: RecordingDisk, kernels: Kernels) -> None:
    """The whole run from step 0, as far as the watcher lets it."""
    opened: list[Engine] = []

    def prepare(engine: Engine) -> None:
        opened.append(engine)
        watcher.attach(engine)

    try:
        engine, step = case.open(RUN, kernels, disk, prepare)
        engine.expects_clip = False  # then the first step is taken back
        run_steps(engine, case.data, step, STEPS)
    finally:
        opened[0].close()


def stops(executions: list[tuple[str, int]], rng: random.Random, every: bool) -> Iterator[tuple[int, int]]:
    """(execution, task) pairs: all, or some of each execution."""
    for index, (_, tasks) in enumerate(executions):
        share = range(tasks) if every else rng.sample(range(tasks), min(tasks, SAMPLED // len(executions)))
        for task in share:
            yield index, task


def test_resume_after_a_stop_at_any_task_is_bit_exact(
    case: Case, kernels: Kernels, seed: int, long: bool
) -> None:
    fresh = RecordingDisk()
    case.start(RUN, kernels, fresh)
    seen, disk = Watcher(), RecordingDisk(deepcopy(fresh.root))
    run(case, seen, disk, kernels)
    assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])
    late, on_fetch = case.plan.commits_late, case.plan.update == "on-fetch"
    wanted = {"load", "first", "step, commit", "drain"} if on_fetch else {"load", "step, commit"}
    if case.plan.speculate:
        wanted |= {f"first{SPECULATING}"}
        wanted -= {"first"}
    assert wanted <= {name.partition(", group")[0].removesuffix(SNAPSHOT) for name, _ in seen.executions}
    assert case.snapshots(RUN, kernels, disk) == case.kept(STEPS)
    for execution, task in stops(seen.executions, random.Random(seed), long):
        where = f"{seen.executions[execution][0]} ({execution}), task {task}"
        disk = RecordingDisk(deepcopy(fresh.root))
        with pytest.raises(Stopped):
            run(case, Watcher(execution, task), disk, kernels)
        step, image = case.state(RUN, kernels, disk)
        assert image == case.expected.images[step], where
        kept = case.snapshots(RUN, kernels, disk)
        assert all(one <= step for one in kept), where
        assert execution - 1 - step <= case.plan.checkpoint.commit_steps + late, where
        resumed, trace = finish(case, RUN, kernels, disk)
        assert (resumed, trace) == (step, case.expected.trace[step:]), where
        assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1]), where
        # One that was cut off behind its commit is for the training loop to copy; these are the engine's.
        kept += [after for after in range(step + 1, STEPS + 1) if keeps(case.plan, after)]
        assert case.snapshots(RUN, kernels, disk) == kept[-case.plan.checkpoint.snapshots_kept :], where


class Signal:
    """Asks an engine to stop from some task of a step on, as soon as that loses nothing."""

    def __init__(self, engine: Engine, after: int) -> None:
        self._engine, self._left = engine, after

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0 and self._engine.clean


@pytest.mark.parametrize("update", ("after-backward", "on-backward", "on-fetch"))
def test_a_stop_while_the_engine_is_clean_keeps_every_step_before(
    update: str, kernels: Kernels, seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State in RAM, committed never but when stopping: what is not clean would be lost."""
    opened: list[Engine] = []
    clean: set[bool] = set()

    def watched(runtime: Runtime, task: Task) -> None:
        clean.add(opened[-1].clean)
        update_body(runtime, task)

    update_body = BODIES[TaskKind.UPDATE]
    monkeypatch.setitem(BODIES, TaskKind.UPDATE, watched)
    plan = make_plan(
        placement=Placement(
            state="ram", weights="ram", inputs="disk", gradients="ram" if update == "on-backward" else "disk"
        ),
        update=update,
        clip=None,
        micro_rows=(1, 1),
        recompute=(True,) * LAYERS,
        commit_steps=1000,
        steps=STEPS,
    )
    case = make_case(tiny_shape(tied=False, layers=LAYERS), plan, STEPS, seed, kernels)
    fresh = RecordingDisk()
    case.start(RUN, kernels, fresh)
    stopped = set()
    signaled = 0 if update == "on-fetch" else 1  # with an update pending it is never clean
    tasks = build_step(PlannedModel(case.shape, plan), COSTS, 1.0).tasks
    # The first and the last task are always among them: one run stops there and one ends.
    some = [0, *random.Random(seed).sample(range(1, tasks - 1), 6), tasks - 1]
    signals = [(signaled, after) for after in (range(tasks) if long else some)]
    if update == "on-fetch":
        signals.append((1, 0))  # too late: the update of step 0 is pending
    for signaled_step, after in signals:
        disk = RecordingDisk(deepcopy(fresh.root))
        engine, _ = case.open(RUN, kernels, disk)
        opened.append(engine)
        done = 0
        try:
            for step in range(STEPS):
                step_engine(engine, case.data, step, Signal(engine, after) if step == signaled_step else None)
                done += 1
        except Stopped:
            assert engine.clean
        stopped.add(done)
        engine.settle(progress(plan, done))
        engine.close()
        assert case.state(RUN, kernels, disk) == (done, case.expected.images[done]), after
    # Early signals stop the step; those after its last clean moment let it finish.
    assert stopped == {signaled, STEPS}
    # Another thread that asks while an update runs, or is about to, must hear of it.
    assert clean == {False}
