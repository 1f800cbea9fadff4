"""The bounds that rule plans out never rule out one that would do."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

from tests.unit.plan.situations import make_situation, random_plans

from packmule.graph.kinds import Tier
from packmule.graph.model import PlannedModel
from packmule.graph.simulate import simulate
from packmule.graph.training import build_step
from packmule.plan.bounds import ram_bound, seconds_bound
from packmule.spec.turns import Turns


def test_no_step_is_smaller_or_faster_than_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    tightest = 0.0
    for _ in range(12):
        situation = make_situation(rng)
        for plan in random_plans(rng, situation, 5):
            pending = plan.update == "on-fetch"
            model = PlannedModel(situation.shape, plan)
            graph = build_step(model, situation.costs, situation.mean_length, pending=pending)
            arena = graph.extent(Tier.RAM)
            bound = ram_bound(situation.shape, plan)
            assert bound <= arena, plan
            tightest = max(tightest, bound / arena)
            busy = seconds_bound(situation.shape, plan, situation.costs, situation.mean_length)
            assert max(busy) <= simulate(graph).seconds * (1 + 1e-9), plan
    assert tightest > 0.7  # a bound of nothing would hold too


def test_bounds_of_groups_that_take_turns_hold_for_the_mean_and_the_largest(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        situation = make_situation(rng)
        turns = Turns(method="hift", layers=rng.choice((1, 2)), ends=rng.random() < 0.7)
        situation = replace(situation, numerics=situation.numerics.model_copy(update={"turns": turns}))
        for plan in random_plans(rng, situation, 3):
            model = PlannedModel(situation.shape, plan)
            graphs = [
                build_step(model, situation.costs, situation.mean_length, group=group)
                for group in range(len(model.groups))
            ]
            assert ram_bound(situation.shape, plan) <= max(graph.extent(Tier.RAM) for graph in graphs), plan
            busy = seconds_bound(situation.shape, plan, situation.costs, situation.mean_length)
            mean = fmean(simulate(graph).seconds for graph in graphs)
            assert max(busy.cores, busy.disk) <= mean * (1 + 1e-9), plan
