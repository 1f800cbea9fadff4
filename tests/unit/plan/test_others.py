"""What an explanation says of the plans that fit as well."""

from __future__ import annotations

import random

import pytest
from tests.unit.plan.situations import make_situation

from packmule.plan.explain import others
from packmule.plan.search import Found, search
from packmule.spec.plan import Placement, Plan


@pytest.fixture
def plan(seed: int) -> Plan:
    return search(make_situation(random.Random(seed))).plan


def said(plan: Plan, *others_found: Plan) -> list[str]:
    return [row[-1] for row in others(Found(plan, others_found, 9, 0, 9)).rows]


def test_plans_that_differ_do_not_look_alike(plan: Plan) -> None:
    place = plan.placement
    changes = {
        "speculate": not plan.speculate,
        "order": "depth" if plan.order == "breadth" else "breadth",
        "placement": place.model_copy(update={"inputs": "ram" if place.inputs == "disk" else "disk"}),
        "numerics": plan.numerics.model_copy(update={"loss_chunk": plan.numerics.loss_chunk + 1}),
    }
    changed = [plan.model_copy(update={key: value}) for key, value in changes.items()]
    kept = place.model_copy(update={"kept_weights": place.kept_weights + 1})
    changed.append(plan.model_copy(update={"placement": kept}))
    parts = plan.numerics.model_copy(update={"vocabulary_parts": plan.numerics.vocabulary_parts + 1})
    changed.append(plan.model_copy(update={"numerics": parts}))
    found = said(plan, *changed)
    assert len(set(found)) == len(found) == len(changed)


def test_plans_that_differ_in_the_cut_of_streams_alone_are_named_once(plan: Plan) -> None:
    cut = plan.model_copy(update={"io": plan.io.model_copy(update={"read_ahead": plan.io.read_ahead + 1})})
    assert said(plan, cut) == []
    other = Placement(state="disk", weights="disk", gradients="disk", inputs="disk")
    assert other != plan.placement
    two = [one.model_copy(update={"placement": other}) for one in (plan, cut)]
    assert len(said(plan, *two)) == 1
