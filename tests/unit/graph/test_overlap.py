"""Updates from disk beside the computation: a step takes little more than its busier resource."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.exactness.runs import make_plan, tiny_shape

from packmule.graph.costs import Costs
from packmule.graph.kinds import COMPUTE, TaskKind
from packmule.graph.model import PlannedModel
from packmule.graph.simulate import simulate
from packmule.graph.step import StepGraph
from packmule.graph.traffic import is_io
from packmule.graph.training import build_step
from packmule.plan.bounds import Sizes, covering
from packmule.spec.plan import Io, Placement, Plan

COSTS = Costs(1e9, 1e9, 1e10, 1e9, 1e9, 0.0, 0.0, 1e-7)
LAYERS, UPDATE_SHARE = 24, 0.05


def durations(graph: StepGraph, disk: float) -> np.ndarray:
    """Seconds per task so that computing takes one, updating and the disk so much of it."""
    kinds = [TaskKind(kind) for kind in graph.kind.tolist()]
    found = np.array(graph.seconds)
    compute = np.array([kind in COMPUTE for kind in kinds])
    on_disk = np.array([is_io(kind) for kind in kinds])
    for mask, share in ((compute, 1.0), (on_disk, disk), (~compute & ~on_disk, UPDATE_SHARE)):
        found[mask] *= share / found[mask].sum()
    return found


def over_bound(plan: Plan, disk: float) -> float:
    """The step over the time of its busier resource."""
    shape = tiny_shape(False, layers=LAYERS)
    graph = build_step(PlannedModel(shape, plan), COSTS, 4.0, pending=plan.update == "on-fetch")
    return simulate(graph, durations(graph, disk)).seconds / (1.0 + UPDATE_SHARE)


@pytest.mark.parametrize(("update", "disk"), [("on-backward", 0.6), ("on-fetch", 0.15)])
def test_updates_from_disk_hide_behind_the_computation(update: str, disk: float) -> None:
    """Behind backward, which is three quarters of it, or behind forward, which is one."""
    plan = make_plan(
        placement=Placement(state="disk", weights="disk", inputs="ram"), update=update, micro_rows=(1,) * 4,
        recompute=(True,) * LAYERS, clip=None, chunk_bytes=4096,
    )  # fmt: skip
    shape = tiny_shape(False, layers=LAYERS)
    enough = covering(plan, Sizes.of(shape, plan.numerics))
    cuts = {ahead: plan.io.model_copy(update={"prefetch": 1, "read_ahead": ahead}) for ahead in (1, enough)}
    cuts[0] = Io(prefetch=0, chunk_bytes=4096, read_ahead=enough)
    found = {name: over_bound(plan.model_copy(update={"io": io}), disk) for name, io in cuts.items()}
    assert found[enough] < 1.1
    assert found[1] > found[enough] + 0.03 and found[0] > found[enough] + 0.03


def test_a_turn_of_the_disk_is_paid_for_where_its_direction_changes() -> None:
    plan = make_plan(
        placement=Placement(state="disk", weights="disk"), recompute=(True,) * 3, clip=None, chunk_bytes=4096
    )
    model = PlannedModel(tiny_shape(False, layers=3), plan)
    found, slow = (
        build_step(model, COSTS, 4.0),
        build_step(model, replace(COSTS, turnaround_seconds=7.0), 4.0),
    )
    disk = [task for task, kind in enumerate(found.kind.tolist()) if is_io(TaskKind(kind))]
    reads = [TaskKind(found.kind[task]).name.startswith("READ") for task in disk]
    turns = sum(before != after for before, after in pairwise(reads))
    assert turns > 10
    assert (slow.seconds - found.seconds).sum() == pytest.approx(7.0 * turns)
