"""The order of tasks and the lives of buffers are needed as they are: without any one edge, or with
any life cut short, a run fails or ends in other bits. So the poison of test mode bites."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.exactness.runs import (
    Case,
    make_case,
    make_plan,
    progress,
    run_steps,
    step_engine,
    tiny_shape,
    watch,
)
from tests.fault.recording_disk import Folder, RecordingDisk

from packmule.engine.bodies import BODIES
from packmule.engine.engine import Engine
from packmule.engine.executor import execute
from packmule.engine.program import Program, Task
from packmule.graph.kinds import BufferKind, TaskKind, Tier
from packmule.graph.step import Csr, StepGraph
from packmule.kernels.contract import Kernels
from packmule.spec.plan import Placement
from packmule.spec.timeline import Timeline
from packmule.tiers.ledger import Ledger

STEPS = 4
SETTLED = 2
"""Steps after which everything is settled once, then the run goes on."""

RUN = Path("/run")
SAMPLED = 15
"""Mutants per plan and kind without `--long`."""

PLANS = {
    "on-fetch": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "update": "on-fetch",
        "prefetch": 2,
    },
    "on-backward": {
        "placement": Placement(state="disk", weights="state", inputs="disk"),
        "update": "on-backward",
        "clip": None,
        "prefetch": 1,
    },
    "two passes": {
        "placement": Placement(state="disk", weights="state", inputs="disk"),
        "update": "on-backward",
        "prefetch": 1,
    },
    "ram": {"placement": Placement(state="ram", weights="state", gradients="disk"), "update": "on-fetch"},
}


WAIT_SECONDS = 30.0


class NeverOvertaken(BaseException):
    """The task that an edge held back did not run first: the edge was implied, or this file is wrong."""


@dataclass(frozen=True)
class Mutant:
    """One program of an engine, changed.

    Attributes:
        edge: (before, after): the edge is left out and `before` waits until `after` has ended.
        buffer: poisoned before its last task, as if released one task early.
    """

    program: str
    edge: tuple[int, int] | None = None
    buffer: int | None = None


class Mutation:
    """Runs programs as the engine does, but for the mutant's."""

    def __init__(self, mutant: Mutant | None) -> None:
        self.mutant = mutant

    def attach(self, engine: Engine) -> None:
        watch(engine, lambda name, program, arguments: self._run(engine, name, program, arguments))

    def _run(self, engine: Engine, name: str, program: Program, arguments: dict) -> Timeline:
        mutant = self.mutant
        if mutant is None or mutant.program != name:
            return program.run(**arguments)
        graph, runtime = program.graph, engine.runtime
        before, after = mutant.edge or (-1, -1)
        if mutant.edge:
            rows = [graph.deps.row(task).tolist() for task in range(graph.tasks)]
            rows[after].remove(before)
            graph = replace(graph, deps=Csr.of(rows))
        passed = threading.Event()
        early = -1 if mutant.buffer is None else int(graph.buffer_last[mutant.buffer])

        def body(index: int) -> None:
            if index == early:
                released(mutant.buffer)
            if index == before and not passed.wait(WAIT_SECONDS):
                raise NeverOvertaken(describe(graph, after))
            try:
                task = Task(graph, index)
                BODIES[task.kind](runtime, task)
            finally:
                if index == after:
                    passed.set()

        def released(buffer: int) -> None:
            if graph.buffer_tier[buffer] == Tier.RAM:
                low, size = int(graph.buffer_offset[buffer]), int(graph.buffer_bytes[buffer])
                runtime.arena.view(low, size)[:] = b"\xff" * size

        ledger = Ledger(graph, released, check=True)
        claim = ledger.start

        def start(task: int) -> None:
            try:
                claim(task)
            except RuntimeError:
                passed.set()  # whoever waits for this task waits in vain
                raise

        ledger.start = start  # type: ignore[method-assign]
        return execute(graph, body, ledger=ledger, main="cores")


@pytest.fixture(params=PLANS)
def case(request: pytest.FixtureRequest, seed: int, kernels: Kernels) -> Case:
    plan = make_plan(steps=STEPS, micro_rows=(1, 1), chunk_bytes=8192, **PLANS[request.param])
    return make_case(tiny_shape(tied=True), plan, STEPS, seed, kernels)


@pytest.fixture
def start(case: Case, kernels: Kernels) -> Folder:
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    return disk.root


def outcome(case: Case, start: Folder, mutant: Mutant | None, kernels: Kernels) -> str | None:
    """What is wrong with a run that has this mutant in it; None: nothing."""
    disk = RecordingDisk(deepcopy(start))
    opened: list[Engine] = []

    def prepare(engine: Engine) -> None:
        opened.append(engine)
        Mutation(mutant).attach(engine)

    try:
        engine, _ = case.open(RUN, kernels, disk, prepare)
        for step in range(STEPS):
            if step_engine(engine, case.data, step) != case.expected.trace[step]:
                return "another trace"
            # Before settling too: a commit that was wrong may be made good by the next.
            for settle in (False, True):
                if settle and step + 1 in (SETTLED, STEPS):
                    engine.settle(progress(case.plan, step + 1))
                head, image = case.state(RUN, kernels, disk)
                if image != case.expected.images[head]:
                    return "another state"
    except Exception as error:
        return repr(error)
    finally:
        opened[0].close()
    return None


def graphs(case: Case, start: Folder, kernels: Kernels) -> dict[str, StepGraph]:
    """Programs that a run executes."""
    seen: dict[str, StepGraph] = {}

    def run(name: str, program: Program, arguments: dict) -> Timeline:
        seen[name] = program.graph
        return program.run(**arguments)

    disk = RecordingDisk(deepcopy(start))
    engine, step = case.open(RUN, kernels, disk, lambda e: watch(e, run))
    run_steps(engine, case.data, step, STEPS)
    engine.close()
    return seen


def needed_edges(graph: StepGraph) -> Iterator[tuple[int, int]]:
    """Edges that no path over other edges and the resources' own order implies. A resident block
    is one buffer to the graph, so its chunks are ordered although they share no bytes: left out."""
    before: list[set[int]] = []
    last: dict[int, int] = {}
    for task in range(graph.tasks):
        found = set(graph.deps.row(task).tolist())
        for resource in graph.uses.row(task).tolist():
            if resource in last:
                found.add(last[resource])
            last[resource] = task
        before.append(found)
    reach: list[set[int]] = []
    for task in range(graph.tasks):
        reach.append(set().union(*(reach[dep] | {dep} for dep in before[task])))
    for task in range(graph.tasks):
        resources = set(graph.uses.row(task).tolist())
        for dep in graph.deps.row(task).tolist():
            ordered = resources & set(graph.uses.row(dep).tolist())
            shared = set(graph.touched(task).tolist()) & set(graph.touched(dep).tolist())
            apart = shared and -1 < graph.part[task] != graph.part[dep] > -1
            if not ordered and not apart and not any(dep in reach[other] for other in before[task]):
                yield dep, task


def describe(graph: StepGraph, task: int) -> str:
    return f"{TaskKind(int(graph.kind[task])).name} block {graph.block[task]} part {graph.part[task]}"


def test_without_any_one_edge_a_run_goes_wrong(
    case: Case, start: Folder, kernels: Kernels, seed: int, long: bool
) -> None:
    assert outcome(case, start, None, kernels) is None
    edges = [
        (name, graph, edge)
        for name, graph in graphs(case, start, kernels).items()
        for edge in needed_edges(graph)
    ]
    if not long:
        edges = random.Random(seed).sample(edges, min(SAMPLED, len(edges)))
    silent = []
    for name, graph, edge in edges:
        wrong = outcome(case, start, Mutant(name, edge=edge), kernels)
        if wrong is None:
            silent.append(f"{name}: {describe(graph, edge[0])} before {describe(graph, edge[1])}")
    assert not silent


def read_last(graph: StepGraph) -> Iterator[int]:
    """Buffers in RAM whose last task reads them and that another task has touched before."""
    for buffer in range(graph.buffers):
        if graph.buffer_tier[buffer] != Tier.RAM or graph.buffer_persistent[buffer]:
            continue
        first, last = int(graph.buffer_first[buffer]), int(graph.buffer_last[buffer])
        if first < last and buffer in graph.reads.row(last).tolist():
            yield buffer


def test_a_buffer_released_one_task_early_is_noticed(
    case: Case, start: Folder, kernels: Kernels, seed: int, long: bool
) -> None:
    buffers = [
        (name, graph, buffer)
        for name, graph in graphs(case, start, kernels).items()
        for buffer in read_last(graph)
    ]
    if not long:
        buffers = random.Random(seed).sample(buffers, min(SAMPLED, len(buffers)))
    silent = []
    for name, graph, buffer in buffers:
        wrong = outcome(case, start, Mutant(name, buffer=buffer), kernels)
        if wrong is None:
            kind = BufferKind(int(graph.buffer_kind[buffer])).name
            silent.append(f"{name}: {kind} of block {graph.buffer_block[buffer]}")
    assert not silent
