"""The bounds that rule plans out never rule out one that would do."""

from __future__ import annotations

import random

from tests.unit.plan.situations import make_situation, random_plans

from packmule.graph.kinds import Tier
from packmule.graph.model import PlannedModel
from packmule.graph.simulate import simulate
from packmule.graph.training import build_step
from packmule.plan.bounds import ram_bound, seconds_bound


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
