"""Learning rates, batch warm-up and weight decay against plain formulas and plain loops."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from packmule.optim.adamw import AdamW
from packmule.optim.schedules import learning_rate, rates
from packmule.spec.growth import Growth, rows_at, rows_before, steps_for
from packmule.spec.plan import Numerics, OptimizerNumerics, ScheduleNumerics


def numerics(rows: int, growth: Growth | None = None, **schedule: Any) -> Numerics:
    return Numerics(
        precision="fp32", micro_rows=(rows,), growth=growth, max_seq_length=8, loss_chunk=8, clip=None,
        optimizer=OptimizerNumerics(), seed=0, threads=1, kernels="torch", torch="0", cpu_features=(),
        schedule=ScheduleNumerics(**{"learning_rate": 1.0, "total_steps": 10, **schedule}),
    )  # fmt: skip


def expected_rate(
    kind: str, shape: str, top: float, low: float, warm: int, decay: int, total: int, step: int
) -> float:
    """As the papers have it, with the step counted from 1 while warming up."""
    if step < warm:
        return (step + 1) / warm * top
    if kind == "constant" or (kind == "wsd" and step < total - decay):
        return top
    begin = max(warm, total - decay) if kind == "wsd" else warm
    x = min(1.0, (step - begin) / max(1, total - begin))
    left = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "sqrt": 1 - x**0.5}[
        shape if kind == "wsd" else kind
    ]
    return low + (top - low) * left


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_every_schedule_warms_up_and_follows_its_formula(kind: str, shape: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        total = rng.randint(1, 60)
        warm, decay = rng.randint(0, total), rng.randint(0, total)
        top = rng.uniform(1e-4, 1e-1)
        low = top * rng.random()
        schedule = ScheduleNumerics(
            kind=kind, learning_rate=top, minimum=low, warmup_steps=warm, total_steps=total,
            decay_steps=decay, decay_shape=shape,
        )  # fmt: skip
        for step in range(total + 3):
            wanted = expected_rate(kind, shape, top, low, warm, decay, total, step)
            assert learning_rate(schedule, step) == pytest.approx(wanted, rel=1e-12, abs=1e-18), (
                step,
                schedule,
            )


def test_wsd_is_flat_between_its_phases_and_longer_runs_share_their_beginning() -> None:
    shorter, longer = (
        ScheduleNumerics(kind="wsd", learning_rate=1.0, warmup_steps=5, total_steps=total, decay_steps=10)
        for total in (40, 400)
    )
    assert [learning_rate(shorter, step) for step in range(30)] == [
        learning_rate(longer, s) for s in range(30)
    ]
    assert {learning_rate(longer, step) for step in range(5, 390)} == {1.0}
    assert learning_rate(shorter, 39) == pytest.approx(0.1)


def test_the_batch_grows_by_doubling_and_every_row_is_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        rows = rng.randint(2, 40)
        start = rng.randint(1, rows - 1)
        doublings = math.ceil(math.log2(rows / start))
        growth = Growth(start_rows=start, steps=rng.randint(doublings, 40))
        sizes = [rows_at(growth, rows, step) for step in range(growth.steps + 5)]
        assert sizes[0] == start
        assert all(b in (a, min(rows, 2 * a)) for a, b in itertools.pairwise(sizes))
        assert sizes[growth.steps - 1] < rows
        assert set(sizes[growth.steps :]) == {rows}
        for step in range(len(sizes)):
            assert rows_before(growth, rows, step) == sum(sizes[:step])
        for wanted in range(1, sum(sizes)):
            steps = steps_for(growth, rows, wanted)
            assert rows_before(growth, rows, steps) >= wanted > rows_before(growth, rows, steps - 1)


def test_without_growth_every_step_is_whole() -> None:
    assert (rows_at(None, 8, 3), rows_before(None, 8, 3), steps_for(None, 8, 17)) == (8, 24, 3)
    assert numerics(8).cut(8) == (8,)


def test_a_smaller_step_takes_the_first_micro_batches() -> None:
    cut = numerics(1).model_copy(update={"micro_rows": (3, 3, 2)}).cut
    assert [cut(rows) for rows in (1, 3, 4, 8)] == [(1,), (3,), (3, 1), (3, 3, 2)]


@pytest.mark.parametrize(("scaling", "power"), [("off", 0.0), ("linear", 1.0), ("sqrt", 0.5)])
@pytest.mark.parametrize("base", [0, 4])
def test_the_rate_follows_the_rows_of_a_step_by_the_rule_asked_for(
    scaling: str, power: float, base: int
) -> None:
    growth = Growth(start_rows=4, steps=6)
    run = numerics(32, growth, kind="linear", scaling=scaling, base_rows=base)
    for step in range(9):
        share = rows_at(growth, 32, step) / (base or 32)
        found = rates(run, step)
        assert found.learning_rate == pytest.approx((1 - step / 10) * share**power)
        assert found.weight == pytest.approx(found.learning_rate**2)


@pytest.mark.parametrize(
    ("fields", "decaying"),
    [
        ({}, {"matrix", "embedding"}),
        ({"decay_embedding": False}, {"matrix"}),
        ({"decay_on": "all"}, {"matrix", "embedding", "norm"}),
        ({"decay_on": "all", "decay_embedding": False}, {"matrix", "norm"}),
    ],
)
def test_weight_decay_goes_by_role(fields: dict[str, Any], decaying: set[str]) -> None:
    rule = AdamW(OptimizerNumerics(weight_decay=0.3, **fields))
    for role in ("matrix", "embedding", "norm"):
        assert rule.decay(role) == (0.3 if role in decaying else 0.0), role
