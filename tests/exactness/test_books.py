"""The memory that is measured is the memory that was simulated, and the arena is exactly as large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.exactness.runs import Case, make_case, make_plan, progress, step_engine, tiny_shape, watch
from tests.exactness.test_phases import NEEDS, NO_STOP, evaluation_rows, groups
from tests.fault.recording_disk import RecordingDisk

from packmule.engine.program import Program
from packmule.graph.kinds import Tier
from packmule.graph.simulate import simulate
from packmule.kernels.contract import Kernels
from packmule.shapes.layout import PAGE
from packmule.spec.plan import Placement
from packmule.spec.timeline import Timeline

RUN = Path("/run")
STEPS = 4

PLANS = {
    "ram": {"commit_steps": 2, "snapshot_steps": 3},
    "ram, on-fetch": {"update": "on-fetch", "commit_steps": 2, "clip": None},
    "ram, on-backward, snapshots": {
        "placement": Placement(state="ram", weights="state", inputs="disk"),
        "update": "on-backward",
        "commit_steps": 2,
        "snapshot_steps": 3,
        "clip": None,
    },
    "disk, on-fetch, snapshots": {
        "placement": Placement(state="disk", weights="ram", gradients="disk"),
        "update": "on-fetch",
        "commit_steps": 2,
        "snapshot_steps": 3,
    },
    "disk, on-fetch": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "update": "on-fetch",
        "commit_steps": 2,
    },
    "disk, on-backward": {
        "placement": Placement(state="disk", weights="state", inputs="disk"),
        "update": "on-backward",
        "clip": None,
        "commit_steps": 2,
        "prefetch": 2,
    },
    "device": {
        "placement": Placement(state="disk", weights="state", inputs="disk", device_weights=2),
        "update": "on-backward",
        "clip": None,
        "commit_steps": 2,
        "device": True,
    },
    "device, on-fetch": {
        "placement": Placement(state="ram", weights="ram", inputs="ram"),
        "update": "on-fetch",
        "commit_steps": 2,
        "device": True,
    },
    "depth": {
        "placement": Placement(state="disk", weights="ram"),
        "order": "depth",
        "commit_steps": 2,
        "snapshot_steps": 3,
        "prefetch": 0,
    },
}


@pytest.fixture(params=PLANS)
def case(request: pytest.FixtureRequest, seed: int, kernels: Kernels) -> Case:
    plan = make_plan(steps=STEPS, micro_rows=(2, 1), **PLANS[request.param])
    return make_case(tiny_shape(tied=False), plan, 0, seed, kernels)


def test_measured_extents_are_the_simulated_ones(case: Case, kernels: Kernels) -> None:
    measured: dict[str, Timeline] = {}

    def run(name: str, program: Program, arguments: dict) -> Timeline:
        measured[name] = program.run(**arguments)
        return measured[name]

    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, lambda opened: watch(opened, run), NEEDS)
    for step in range(STEPS):
        step_engine(engine, case.data, step)
    engine.settle(progress(case.plan, STEPS))
    engine.evaluate(groups(engine, evaluation_rows(case)))
    list(engine.generate([1, 2, 3], NO_STOP))
    for step in (STEPS, STEPS + 1):
        step_engine(engine, case.data, step)
        engine.settle(progress(case.plan, step + 1))
    # on-fetch commits in a step's forward or by draining: nothing is ever left to "commit".
    unused = {"commit"} if case.plan.update == "on-fetch" else set()
    assert set(engine.programs) - set(measured) == unused

    most = 0
    for name, timeline in measured.items():
        graph = engine.programs[name].graph
        predicted = engine.predicted(name)
        assert timeline.extent == predicted.extent, name
        for tier in graph.tiers:
            rows, other = timeline.ledger_bytes[tier], predicted.ledger_bytes[tier]
            assert (rows[0], rows[-1]) == (other[0], other[-1]), (name, tier)
            assert rows.max(initial=0) <= timeline.extent[tier], (name, tier)
        most = max(most, timeline.extent["ram"])
        # On the durations that were measured, the simulator keeps the same books event by event.
        again = simulate(graph, timeline.end - timeline.start)
        assert sorted(again.ledger_task.tolist()) == sorted(timeline.ledger_task.tolist()), name
        assert (again.start <= timeline.start + 1e-9).all(), name
    most = max(most, *(p.graph.extent(Tier.RAM) for p in engine.programs.values()))
    assert engine.arena.bytes == -(-most // PAGE) * PAGE
    assert engine.arena.bytes == len(engine.arena.memory)
    if case.plan.device is not None:
        largest = max(program.graph.extent(Tier.DEVICE) for program in engine.programs.values())
        assert len(engine.runtime.memory[Tier.DEVICE]) == -(-largest // PAGE) * PAGE
    engine.close()


def test_every_buffer_of_every_graph_is_used(case: Case, kernels: Kernels) -> None:
    """A buffer that no task touches would be memory that is planned and never needed."""
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
    for name, program in engine.programs.items():
        graph = program.graph
        graph.check()
        idle = np.flatnonzero((graph.buffer_first < 0) & ~graph.buffer_persistent)
        assert len(idle) == 0, name
    engine.close()
