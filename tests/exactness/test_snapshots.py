"""Snapshots and late commits in the background: the bytes of a copy made between steps, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.exactness.runs import (
    Case,
    make_case,
    make_plan,
    open_store,
    progress,
    run_steps,
    step_engine,
    tiny_shape,
)
from tests.exactness.test_phases import NEEDS, evaluation_rows, groups
from tests.fault.recording_disk import RecordingDisk

from packmule.checkpoint.snapshots import SnapshotWriter, snapshot, snapshot_path
from packmule.engine.executor import Stopped
from packmule.errors import DiskError
from packmule.graph.kinds import BufferKind, TaskKind
from packmule.kernels.contract import Kernels
from packmule.optim.rule import Update
from packmule.spec.plan import Placement
from packmule.tiers.disk import aligned_buffer

RUN = Path("/run")
STEPS = 4

PLANS = {
    "ram": {"commit_steps": 3, "placement": Placement(state="ram", weights="ram", inputs="disk")},
    "ram, on-backward": {"update": "on-backward", "clip": None},
    "ram, on-backward, two passes": {"update": "on-backward", "commit_steps": 2},
    "ram, on-fetch": {
        "placement": Placement(state="ram", weights="state", gradients="disk"),
        "update": "on-fetch",
    },
    "disk, on-fetch": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "update": "on-fetch",
        "commit_steps": 3,
    },
    "disk, on-backward": {
        "placement": Placement(state="disk", weights="state"),
        "update": "on-backward",
        "clip": None,
    },
    "disk, after-backward, commit every 3": {
        "placement": Placement(state="disk", weights="ram", gradients="disk"),
        "commit_steps": 3,
        "prefetch": 2,
    },
}
RESIDENT = [name for name in PLANS if name.startswith("ram")]


def case_of(name: str, seed: int, kernels: Kernels, **more: object) -> Case:
    plan = make_plan(
        **{
            "steps": STEPS, "micro_rows": (2, 1), "snapshot_steps": 1, "snapshots_kept": 9,
            **PLANS[name], **more,
        }
    )  # fmt: skip
    return make_case(tiny_shape(tied=seed % 2 == 0), plan, STEPS, seed, kernels)


@pytest.fixture(params=PLANS)
def case(request: pytest.FixtureRequest, seed: int, kernels: Kernels) -> Case:
    return case_of(request.param, seed, kernels)


def contents(disk: RecordingDisk, folder: Path) -> dict[str, bytes]:
    return {name: disk.read_bytes(folder / name) for name in disk.list(folder)}


def test_its_files_are_those_of_a_copy_made_between_steps(case: Case, kernels: Kernels) -> None:
    behind, between = RecordingDisk(), RecordingDisk()
    for disk in (behind, between):
        case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, behind)
    run_steps(engine, case.data, 0, STEPS)
    made = engine.snapshots_made()
    engine.close()
    assert made == [(step, snapshot_path(RUN, step)) for step in range(1, STEPS + 1)]
    for step in range(STEPS):
        engine, first = case.open(RUN, kernels, between)
        assert first == step
        step_engine(engine, case.data, step)
        engine.settle(progress(case.plan, step + 1))
        engine.close()
        store = open_store(RUN, case.shape, case.plan, kernels, between)
        store.load()
        path = snapshot(store, aligned_buffer(store.layout.chunk_bytes))
        store.close()
        assert contents(behind, path) == contents(between, path), path


def test_what_comes_before_or_after_a_step_changes_no_snapshot(
    case: Case, kernels: Kernels, seed: int
) -> None:
    """Settled or not, evaluated in between or not: the same trace, state and snapshots."""
    rng = random.Random(seed)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
    trace = []
    for step in range(STEPS):
        trace.append(step_engine(engine, case.data, step))
        if engine.update_pending or rng.random() < 0.3:
            if rng.random() < 0.5:
                continue
            engine.settle(progress(case.plan, step + 1))
        engine.evaluate(groups(engine, evaluation_rows(case)))
    engine.settle(progress(case.plan, STEPS))
    engine.close()
    assert trace == case.expected.trace
    assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])
    assert case.snapshots(RUN, kernels, disk) == case.kept(STEPS)


@pytest.mark.parametrize("name", RESIDENT)
def test_an_update_waits_only_for_the_store_of_its_own_block(name: str, kernels: Kernels, seed: int) -> None:
    case = case_of(name, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    graph = engine.programs["step, commit, snapshot"].graph
    engine.close()
    stores = np.flatnonzero(np.isin(graph.kind, (TaskKind.WRITE_STATE, TaskKind.WRITE_SNAPSHOT)))
    on_fetch = case.plan.update == "on-fetch"
    for block in range(len(case.shape.blocks())):
        own = stores[graph.block[stores] == block].tolist()
        updates = np.flatnonzero((graph.kind == TaskKind.UPDATE) & (graph.block == block)).tolist()
        assert own and updates
        for update in updates:
            waits = set(graph.deps.row(update).tolist()) & set(stores.tolist())
            assert waits == (set() if on_fetch else set(own))
        for store in own if on_fetch else ():
            assert set(updates) & set(graph.deps.row(store).tolist()), "stored before it is updated"
    # Spread over the step: not all before or after the computations.
    compute = np.flatnonzero(graph.kind == TaskKind.LAYER_BACKWARD)
    assert (stores < compute[0]).any() and (stores > compute[0]).any()
    assert set(graph.buffer_kind[graph.writes.row(int(stores[1]))].tolist()) == {BufferKind.COPY}


@pytest.fixture
def later(kernels: Kernels, seed: int) -> Iterator[Callable[[int], tuple[Case, RecordingDisk, bool]]]:
    """A run with state in RAM whose third step is stopped before some task, if it is clean then."""

    def run(after: int) -> tuple[Case, RecordingDisk, bool]:
        case = case_of("ram", seed, kernels, commit_steps=1000, snapshot_steps=2)
        disk, left = RecordingDisk(), [after]
        case.start(RUN, kernels, disk)
        engine, _ = case.open(RUN, kernels, disk)

        def stopping() -> bool:
            left[0] -= 1
            return left[0] < 0 and engine.clean

        for step in range(2):
            step_engine(engine, case.data, step)
        try:
            step_engine(engine, case.data, 2, stopping)
            stopped = False
        except Stopped:
            stopped = True
        engine.settle(progress(case.plan, 2 if stopped else 3))
        assert engine.snapshots_made()[-1:] == [(2, snapshot_path(RUN, 2))]
        engine.close()
        return case, disk, stopped

    yield run


def test_a_stop_while_a_commit_is_stored_finishes_it(
    later: Callable[[int], tuple[Case, RecordingDisk, bool]], kernels: Kernels, seed: int, long: bool
) -> None:
    """The step before is in RAM, in part on disk: it is committed, and so is its snapshot."""
    rng, ends = random.Random(seed), set()
    for after in range(200) if long else (0, 1, *rng.sample(range(2, 60), 5), 10_000):
        case, disk, stopped = later(after)
        ends.add(stopped)
        done = 2 if stopped else 3
        assert case.state(RUN, kernels, disk) == (done, case.expected.images[done]), after
        assert case.snapshots(RUN, kernels, disk) == [2], after
        assert not [name for name in disk.list(RUN) if name.endswith(".tmp")], after
    assert ends == {True, False}


def test_without_room_for_a_snapshot_no_step_is_lost(
    case: Case, kernels: Kernels, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = random.Random(seed).randrange(1, STEPS + 1)

    class Full(SnapshotWriter):
        def __init__(self, store: object, target: Path) -> None:
            if target == snapshot_path(RUN, full):
                raise DiskError(f"{target}: the disk is full.")
            super().__init__(store, target)

    monkeypatch.setattr("packmule.engine.runtime.SnapshotWriter", Full)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    with pytest.raises(DiskError, match="the disk is full"):
        run_steps(engine, case.data, 0, STEPS)
    engine.close()
    # Where a step is committed by the next one's graph, it had ended.
    done = full if case.plan.commits_late else full - 1
    assert case.state(RUN, kernels, disk) == (done, case.expected.images[done])
    assert case.snapshots(RUN, kernels, disk) == list(range(1, full))


def test_a_snapshot_that_is_cut_off_leaves_nothing(case: Case, kernels: Kernels, seed: int) -> None:
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    step_engine(engine, case.data, 0)
    graph = engine.programs["step, commit, snapshot"].graph
    writes = np.flatnonzero(graph.kind == TaskKind.WRITE_SNAPSHOT).tolist()
    last = random.Random(seed).choice(writes)
    batches = case.data.batches(1, case.plan.numerics)
    after = progress(case.plan, 2)
    with pytest.raises(Stopped):
        engine.step(batches, 1, Update(2, 0.0), after, commit=True, snapshot=True, stop_after=last)
    assert any(name.endswith(".tmp") for name in disk.list(RUN))
    engine.close()
    assert not [name for name in disk.list(RUN) if name.endswith(".tmp")]
    # Late, it was that of the first step; else that one was whole before.
    expected = [] if case.plan.commits_late else [1]
    assert case.snapshots(RUN, kernels, disk) == expected
