"""A large vocabulary is cut into parts where a budget needs it, and only there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import make_situation

from packmule.graph.model import PlannedModel
from packmule.plan.candidates import candidates
from packmule.plan.explain import explain
from packmule.plan.predict import baseline
from packmule.plan.search import search
from packmule.plan.situation import Situation
from packmule.shapes.model import ModelShape

LARGE = ModelShape(
    vocab=100_000, hidden=1024, layers=2, heads=8, kv_heads=4, head_dim=64, ffn=1024, norm_eps=1e-5,
    rope_theta=1e4, tied=True, max_positions=2048,
)  # fmt: skip
ABOVE_BASELINE = 250_000_000


def large(rng: random.Random, tied: bool, above: int) -> Situation:
    """Two rows of 128 tokens a step, so many bytes above Python and torch."""
    situation = make_situation(rng)
    numerics = situation.numerics.model_copy(
        update={"precision": "bf16-mixed", "micro_rows": (2,), "max_seq_length": 128}
    )
    situation = replace(
        situation, shape=replace(LARGE, tied=tied), numerics=numerics, mean_length=64.0, evaluation_rows=(4,),
        sample_tokens=7, recompute=True,
    )  # fmt: skip
    return replace(situation, budget_bytes=baseline(situation) + above)


@pytest.mark.parametrize("tied", (False, True))
def test_a_vocabulary_larger_than_the_budget_is_cut(tied: bool, seed: int) -> None:
    situation = large(random.Random(seed), tied, ABOVE_BASELINE)
    found = search(situation)
    plan, predicted = found.plan, found.plan.predicted
    assert predicted is not None and predicted.peak_ram_bytes <= situation.budget_bytes
    parts = plan.numerics.vocabulary_parts
    assert parts > 1
    model = PlannedModel(situation.shape, plan)
    table = 4 * LARGE.vocab * LARGE.hidden
    assert max(model.plane_bytes) < table / parts + 3 * LARGE.hidden * LARGE.ffn * 8
    assert f"vocabulary    in {parts} parts" in explain(situation, found)


@pytest.mark.parametrize("tied", (False, True))
def test_a_vocabulary_that_fits_is_left_whole(tied: bool, seed: int) -> None:
    found = search(large(random.Random(seed), tied, 12_000_000_000))
    assert found.plan.numerics.vocabulary_parts == 1


def test_a_resumed_run_keeps_its_cut(seed: int) -> None:
    situation = large(random.Random(seed), True, ABOVE_BASELINE)
    assert {plan.numerics.vocabulary_parts for plan in candidates(situation)} > {1}
    for parts in (1, 7):
        kept = candidates(replace(situation, vocabulary_parts=parts))
        assert {plan.numerics.vocabulary_parts for plan in kept} == {parts}
