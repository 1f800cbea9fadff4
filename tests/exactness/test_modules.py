"""A user's own modules: a step equals plain torch to the bit, wherever things lie and however it is cut."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.exactness.runs import HIFT, make_plan, progress
from tests.exactness.user_modules import ModuleCase, plain_losses, plain_run

from packmule.engine.executor import Stopped
from packmule.kernels.contract import Kernels
from packmule.models.modules.samples import Draw
from packmule.models.views import TORCH_DTYPES
from packmule.optim.rule import Update
from packmule.plan.candidates import allowed
from packmule.spec.plan import Placement, Plan
from packmule.spec.tally import Tally
from packmule.spec.turns import Turns

STEPS = 4
LAYERS = 4


def plans(
    precision: str, clip: float | None, rng: random.Random, count: int, turns: Turns | None = None
) -> list[Plan]:
    """Placements, orders and update modes that exist, drawn at random."""
    found = []
    for state, weights, gradients, inputs, order, update, prefetch in product(
        ("ram", "disk"), ("state", "ram", "disk"), ("ram", "disk"), ("ram", "disk"), ("breadth", "depth"),
        ("after-backward", "on-backward", "on-fetch"), (0, 2),
    ):  # fmt: skip
        if update == "on-backward" and gradients == "disk":
            continue
        plan = make_plan(
            precision, micro_rows=(3, 2), clip=clip, recompute=(True,) * LAYERS, order=order, update=update,
            prefetch=prefetch, length=1, loss_chunk=3, turns=turns,
            placement=Placement(state=state, weights=weights, gradients=gradients, inputs=inputs),
        )  # fmt: skip
        if allowed(plan):
            found.append(plan)
    return rng.sample(found, count)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16-mixed"])
def test_a_step_equals_a_plain_loop_to_the_bit_wherever_things_lie(
    precision: str,
    dropout: float,
    tmp_path: Path,
    kernels: Kernels,
    rng: random.Random,
    seed: int,
    long: bool,
) -> None:
    for number, plan in enumerate(plans(precision, rng.choice([None, 0.5]), rng, 40 if long else 5)):
        case = ModuleCase.of(plan, seed, dropout)
        trace, images = plain_run(case, STEPS, kernels)
        folder = tmp_path / str(number)
        folder.mkdir()
        case.start(folder, kernels)
        engine, _ = case.open(folder, kernels)
        assert case.run(engine, 0, STEPS) == trace, plan
        engine.close()
        assert case.state(folder, kernels) == (STEPS, images[-1]), plan
    assert images[0] != images[-1]


def test_blocks_that_take_turns_give_the_same_bits_wherever_things_lie(
    tmp_path: Path, kernels: Kernels, rng: random.Random, seed: int
) -> None:
    """Those of a plain loop in float64, to rounding: autograd may use other kernels where weights are
    frozen."""
    found = []
    for number, plan in enumerate(plans("fp64", 0.5, rng, 3, HIFT)):
        case = ModuleCase.of(plan, seed, 0.5)
        trace, _ = plain_run(case, STEPS, kernels)
        folder = tmp_path / str(number)
        folder.mkdir()
        case.start(folder, kernels)
        engine, _ = case.open(folder, kernels)
        found.append((case.run(engine, 0, STEPS), case.state(folder, kernels)))
        engine.close()
        assert found[-1] == found[0], plan
        for ours, theirs in zip(found[-1][0], trace, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10)


def test_dropout_draws_anew_each_step_and_is_the_same_in_backward(kernels: Kernels, seed: int) -> None:
    plan = make_plan("fp64", recompute=(True,) * LAYERS, length=1)
    with_it, without = ModuleCase.of(plan, seed, 0.5), ModuleCase.of(plan, seed, 0.0)
    assert with_it.masters[1]["conv.weight"].equal(without.masters[1]["conv.weight"])
    assert plain_run(with_it, 1, kernels)[0] != plain_run(without, 1, kernels)[0]
    batch = with_it.batches(0)[0]
    leaves = [{n: v.double() for n, v in named.items()} for named in with_it.masters]
    draws = [Draw(1, 0), Draw(1, 0), Draw(2, 0), Draw(1, 1)]
    once, again, later, other = (plain_losses(with_it, leaves, batch, draw) for draw in draws)
    assert once.equal(again)
    assert not once.equal(later) and not once.equal(other)


@pytest.mark.parametrize("update", ["after-backward", "on-fetch"])
def test_stopping_after_any_task_and_resuming_changes_nothing(
    update: str, tmp_path: Path, kernels: Kernels, rng: random.Random, seed: int, long: bool
) -> None:
    plan = make_plan(
        "fp32", micro_rows=(2, 2), update=update, recompute=(True,) * LAYERS, length=1,
        placement=Placement(state="disk", weights="state", gradients="disk", inputs="disk"),
    )  # fmt: skip
    case = ModuleCase.of(plan, seed, 0.3)
    trace, images = plain_run(case, STEPS, kernels)
    for number in range(60 if long else 8):
        folder = tmp_path / str(number)
        folder.mkdir()
        case.start(folder, kernels)
        engine, _ = case.open(folder, kernels)
        before = rng.randint(0, STEPS - 1)
        case.run(engine, 0, before)
        tasks = engine.programs["step, commit"].graph.tasks
        with pytest.raises(Stopped):
            engine.step(
                case.batches(before), plan.numerics.rows, Update(before + 1, 1e-2),
                progress(plan, before + 1), True, stop_after=rng.randrange(tasks // 2),
            )  # fmt: skip
        engine.close()
        engine, step = case.open(folder, kernels)
        assert step == before
        assert case.run(engine, step, STEPS) == trace[step:]
        engine.close()
        assert case.state(folder, kernels) == (STEPS, images[-1])


def test_modules_and_functions_that_make_them_start_alike(seed: int) -> None:
    plan = make_plan("fp32", recompute=(True,) * LAYERS, length=1)
    whole, lazy = ModuleCase.of(plan, seed, lazy=False), ModuleCase.of(plan, seed, lazy=True)
    for first, second in zip(whole.masters, lazy.masters, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            assert first[name].equal(second[name])


def test_an_evaluation_is_a_plain_forward_without_dropout(
    tmp_path: Path, kernels: Kernels, seed: int
) -> None:
    plan = make_plan(
        "fp32", micro_rows=(3, 2), recompute=(True,) * LAYERS, length=1,
        placement=Placement(state="disk", weights="state"),
    )  # fmt: skip
    case = ModuleCase.of(plan, seed, 0.5)
    case.start(tmp_path, kernels)
    engine, _ = case.open(tmp_path, kernels, evaluation_rows=(11,))
    groups, start, expected = [], 0, 0.0
    weights = [
        {n: v.to(TORCH_DTYPES[case.bodies.types.compute]) for n, v in named.items()} for named in case.masters
    ]
    for rows in engine.evaluation_groups(11):
        group = []
        for count in rows:
            group.append(case.samples.micro_batch(range(start, start + count)))
            start += count
            losses = plain_losses(case, weights, group[-1], None)
            expected += float(losses.sum(dtype=torch.float64))
        groups.append(group)
    assert engine.evaluate(iter(groups)) == Tally(expected, 11, correct=None)
    engine.close()
