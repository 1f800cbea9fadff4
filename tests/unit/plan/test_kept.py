"""Blocks kept in spare RAM: what is kept is not read, and the search keeps some where the disk is slow."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.unit.plan.situations import make_situation, random_plans

from packmule.graph.kinds import TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.traffic import traffic
from packmule.graph.training import build_step
from packmule.plan.candidates import candidates
from packmule.plan.search import search
from packmule.plan.situation import Situation
from packmule.spec.plan import Plan


def step(situation: Situation, plan: Plan) -> tuple[int, int, int]:
    """(bytes read, bytes written, bytes of RAM that stay from step to step)."""
    model = PlannedModel(situation.shape, plan)
    pending = plan.update == "on-fetch"
    graph = build_step(model, situation.costs, situation.mean_length, pending=pending)
    return *traffic(graph), model.residents.bytes[Tier.RAM]


def test_what_is_kept_is_not_read(seed: int) -> None:
    rng, tried = random.Random(seed), 0
    while tried < 12:
        situation = make_situation(rng)
        for plan in random_plans(rng, situation, 4):
            if plan.placement.state == "ram":
                continue
            tried += 1
            model = PlannedModel(situation.shape, plan)
            kept = rng.randint(1, len(model.blocks))
            some = plan.placement.model_copy(update={"kept_state": kept})
            before, after = (
                step(situation, plan),
                step(situation, plan.model_copy(update={"placement": some})),
            )
            blocks = [index for index in range(len(model.blocks)) if index in model.outermost[:kept]]
            planes = len(model.planes)
            state = sum(model.plane_bytes[block] * planes for block in blocks)
            # An update reads all planes of a block once; weights made from the state save more.
            assert before[0] - after[0] >= state
            if plan.placement.weights != "state":
                assert before[0] - after[0] == state
            assert before[1] == after[1]
            assert after[2] - before[2] >= state


def test_less_is_read_than_by_a_cache_of_what_was_used_last(seed: int) -> None:
    """Every block is used in the same order each step, so the oldest is always what is needed next."""
    rng, tried = random.Random(seed), 0
    while tried < 5:
        situation = make_situation(rng)
        wanted = (
            p for p in candidates(situation) if (p.placement.state, p.placement.weights) == ("disk", "ram")
        )
        plan = next(wanted)
        model = PlannedModel(situation.shape, plan)
        if len(model.blocks) < 4:
            continue
        tried += 1
        kept = rng.randint(2, len(model.blocks) - 1)
        some = plan.placement.model_copy(update={"kept_state": kept})
        state = [sum(model.plane_sizes[block.index]) for block in model.blocks]
        room = sum(state[block] for block in model.outermost[:kept])
        graph = build_step(model, situation.costs, 1.0, pending=plan.update == "on-fetch")
        used = [
            int(graph.block[task]) for task in range(graph.tasks) if graph.kind[task] == TaskKind.READ_STATE
        ]
        order = [block for index, block in enumerate(used) if block not in used[:index]]
        held: list[int] = []
        read = 0
        for _ in range(3):
            read = 0
            for block in order:
                read += 0 if block in held else state[block]
                held = [other for other in held if other != block] + [block]
                while sum(state[other] for other in held) > room:
                    held.pop(0)
        saved = step(situation, plan)[0] - step(situation, plan.model_copy(update={"placement": some}))[0]
        assert sum(state) - saved <= read and saved == room


def test_the_search_keeps_blocks_where_the_disk_is_what_takes_time(seed: int) -> None:
    """State is to be on disk, the disk is slow, and there is room for all of it: nothing is read."""
    rng = random.Random(seed)
    for _ in range(3):
        situation = make_situation(rng)
        slow = replace(situation.costs, read_bytes=1e6, write_bytes=1e6)
        wishes = situation.wishes.model_copy(update={"state": "disk"})
        found = search(replace(situation, wishes=wishes, costs=slow, budget_bytes=1 << 40)).plan
        blocks = len(situation.shape.blocks())
        assert found.placement.kept_state == blocks
        assert found.placement.weights in ("state", "ram") or found.placement.kept_weights == blocks
