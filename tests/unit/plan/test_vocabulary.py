"""A large vocabulary is cut into parts where a budget needs it, and only there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import make_situation

from packmule.errors import DoesNotFit
from packmule.graph.model import PlannedModel
from packmule.plan.candidates import candidates, why_uncut
from packmule.plan.changes import changes_of
from packmule.plan.explain import explain
from packmule.plan.predict import baseline
from packmule.plan.search import search
from packmule.plan.situation import Situation
from packmule.shapes.model import ModelShape
from packmule.spec.plan import OptimizerNumerics
from packmule.spec.turns import Turns

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


UNCUT = {
    "`optim.block_schedule` = 'hift'": {"turns": Turns(method="hift")},
    "`optim.block_schedule` = 'badam'": {"turns": Turns(method="badam", steps=3)},
    "`optim.optim` = 'adalomo'": {"optimizer": OptimizerNumerics(rule="adalomo")},
}


@pytest.mark.parametrize("key", UNCUT)
def test_turns_and_rules_of_whole_tensors_keep_a_vocabulary_whole_and_say_so(key: str, seed: int) -> None:
    situation = large(random.Random(seed), False, ABOVE_BASELINE)
    kept = situation.numerics.model_copy(update=UNCUT[key])
    plans = candidates(replace(situation, numerics=kept))
    assert {plan.numerics.vocabulary_parts for plan in plans} == {1}
    sentence = why_uncut(situation.shape, kept)
    assert sentence is not None and f"are not offered with {key}" in sentence
    assert why_uncut(replace(situation.shape, vocab=1000), kept) is None
    assert why_uncut(situation.shape, situation.numerics) is None


@pytest.mark.parametrize("key", UNCUT)
def test_a_refusal_may_propose_what_lets_the_vocabulary_be_cut(key: str, seed: int) -> None:
    situation = large(random.Random(seed), False, ABOVE_BASELINE)
    kept = replace(situation, numerics=situation.numerics.model_copy(update=UNCUT[key]))
    way = "--block-schedule all" if "turns" in UNCUT[key] else "--optim adamw"
    assert way not in changes_of(situation, None)
    changed = changes_of(kept, None)[way](kept)
    assert changed.numerics == situation.numerics
    assert {plan.numerics.vocabulary_parts for plan in candidates(changed)} > {1}


def test_a_refusal_says_what_keeps_the_vocabulary_whole(seed: int) -> None:
    situation = large(random.Random(seed), False, ABOVE_BASELINE)
    numerics = situation.numerics.model_copy(update={"optimizer": OptimizerNumerics(rule="adalomo")})
    # Nothing else may be tried, which would take long.
    shape = replace(LARGE, tied=False, hidden=192, layers=1)
    situation = replace(situation, shape=shape, numerics=numerics, fixed=True, update="on-backward")
    situation = replace(situation, budget_bytes=baseline(situation) + 20_000_000)
    with pytest.raises(DoesNotFit, match=r"not offered with `optim\.optim` = 'adalomo'"):
        search(situation)
