"""Layers with experts through the engine: the bits of the plain loop, whatever streams and however."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.exactness.pairs import Row, covering_rows
from tests.exactness.runs import (
    HIFT,
    Case,
    finish,
    make_batch,
    make_case,
    make_plan,
    plain_run,
    run_steps,
    step_engine,
)
from tests.exactness.test_pairs import AXES, check
from tests.exactness.test_phases import NEEDS, NO_STOP, POSITIONS, ROWS, groups
from tests.fault.recording_disk import RecordingDisk
from tests.parity.plain import PlainModel, forward, plain_logits, poisoned

from packmule.kernels.contract import Kernels
from packmule.models import decoder as bodies_of
from packmule.models.context import TokenBatch
from packmule.plan.candidates import allowed
from packmule.shapes import bodies
from packmule.shapes.experts import Experts
from packmule.shapes.layer import LayerKind
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Placement, Plan
from packmule.spec.tally import Tally

STEPS = 3
RUN = Path("/run")


def sparse_shape(tied: bool, balance: float) -> ModelShape:
    """Three layers of which the second is dense; experts in groups of unequal size."""
    experts = LayerKind(feed_forward=Experts(5, 2, 14, renormalize=True, balance=balance, groups=3))
    return ModelShape(
        vocab=97, hidden=24, layers=3, heads=4, kv_heads=2, head_dim=6, ffn=40, norm_eps=1e-5,
        rope_theta=1e4, tied=tied, max_positions=64, kinds=(experts, LayerKind(), experts),
    )  # fmt: skip


CHOICES = {
    **{name: AXES[name] for name in ("precision", "state", "weights", "gradients", "inputs", "update")},
    "prefetch": (0, 2),
    "micro_rows": ((3,), (2, 1)),
    "order": ("breadth", "depth"),
    "recompute": ((True, True, True), (False, False, False), (True, False, False)),
    "clip": (None, 1.0),
    "balanced": (True, False),
    "turns": (None, HIFT),
}


def plan_of(row: Row) -> Plan:
    placement = Placement(**{kind: row[kind] for kind in ("state", "weights", "gradients", "inputs")})
    names = ("precision", "update", "prefetch", "micro_rows", "order", "recompute", "clip", "turns")
    return make_plan(placement=placement, steps=STEPS, **{name: row[name] for name in names})


def offered(row: Row) -> bool:
    if row["balanced"] and row["order"] == "depth":
        return False
    return allowed(plan_of(row)) and not (row["update"] == "on-backward" and row["gradients"] == "disk")


def test_every_pair_of_choices_gives_the_bits_of_the_plain_loop(kernels: Kernels, seed: int) -> None:
    made: dict[tuple[object, ...], Case] = {}
    for row in covering_rows(CHOICES, offered, random.Random(seed), tries=60):
        key = tuple(row[name] for name in ("precision", "micro_rows", "clip", "balanced", "turns"))
        if key not in made:
            shape = sparse_shape(len(made) % 2 == 0, 0.5 if row["balanced"] else 0.0)
            made[key] = make_case(shape, plan_of(row), STEPS, seed, kernels)
        check(replace(made[key], plan=plan_of(row)), row, RUN, kernels, RecordingDisk())


def test_how_experts_are_grouped_changes_no_bit(kernels: Kernels, seed: int) -> None:
    traces = []
    for count in (1, 2, 5):
        shape = sparse_shape(False, 0.5)
        kinds = tuple(
            replace(kind, feed_forward=replace(kind.feed_forward, groups=count))
            if kind.feed_forward
            else kind
            for kind in shape.kinds
        )
        plan = make_plan("bf16-mixed", recompute=(True, False, False), clip=None, update="on-backward")
        case = make_case(replace(shape, kinds=kinds), plan, 0, seed, kernels)
        disk = RecordingDisk()
        case.start(RUN, kernels, disk)
        engine, _ = case.open(RUN, kernels, disk)
        # Norms are added up block by block, so only losses say the same.
        traces.append([step_engine(engine, case.data, step)[0] for step in range(STEPS)])
        engine.close()
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("update", ("after-backward", "on-fetch"))
def test_a_run_that_stopped_goes_on_to_the_same_state(kernels: Kernels, seed: int, update: str) -> None:
    placement = Placement(state="disk", weights="state", gradients="disk", inputs="disk")
    plan = make_plan(
        placement=placement, update=update, recompute=(True,) * 3, steps=STEPS, micro_rows=(2, 1)
    )
    case = make_case(sparse_shape(True, 0.5), plan, STEPS, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    for step in range(2):
        step_engine(engine, case.data, step)
    engine.close()
    first, trace = finish(case, RUN, kernels, disk)
    assert trace == case.expected.trace[first:] and 0 < first < STEPS
    assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])


def test_the_step_reports_the_balance_loss(kernels: Kernels, seed: int) -> None:
    """It cannot be below k, which it is when every expert gets as much as the others, nor above E."""
    case = make_case(sparse_shape(True, 0.5), make_plan(recompute=(True,) * 3), 0, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    step_engine(engine, case.data, 0)
    assert 1.9 < engine.runtime.state.balance < 5
    engine.close()


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed"))
def test_evaluation_and_generation_equal_the_plain_forward(
    kernels: Kernels, seed: int, precision: str
) -> None:
    rng, found = random.Random(seed), []
    prompt = [rng.randrange(97) for _ in range(7)]
    for placement in (
        Placement(state="ram", weights="state"),
        Placement(state="disk", weights="state", inputs="disk"),
        Placement(state="disk", weights="ram", gradients="disk"),
    ):
        plan = make_plan(precision, (2, 1), placement=placement, recompute=(True,) * 3, steps=STEPS)
        case = make_case(sparse_shape(False, 0.5), plan, 0, seed, kernels)
        disk = RecordingDisk()
        case.start(RUN, kernels, disk)
        engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
        run_steps(engine, case.data, 0, 2)
        model = case.model(kernels)
        plain_run(model, plan.numerics, case.data, 2, kernels)
        rows = case.data.rows(1000, ROWS, plan.numerics.max_seq_length)
        assert engine.evaluate(groups(engine, rows)) == evaluated(model, case, rows)
        found.append(list(engine.generate(prompt, NO_STOP)))
        engine.close()
    assert found[0] == found[1] == found[2]
    ids = list(prompt)
    limit = 1e-4 if precision == "fp32" else 0.2
    for token in found[0]:
        logits = plain_logits(model, TokenBatch.from_batch(make_batch([[ids]])))[-1].float()
        assert float(logits.max() - logits[token]) < limit
        ids.append(token)
    assert len(ids) == POSITIONS + 1


def evaluated(model: PlainModel, case: Case, rows: list[list[list[int]]]) -> Tally:
    """The sums over the same micro-batches, every tensor resident."""
    numerics, total = case.plan.numerics, Tally()
    for start in range(0, len(rows), max(numerics.micro_rows)):
        batch = TokenBatch.from_batch(make_batch(rows[start : start + max(numerics.micro_rows)]))
        inputs, _ = forward(model, batch, max(numerics.micro_tokens))
        scratch = poisoned(bodies.head_scratch(model.shape, numerics.loss_chunk, model.types, train=False))
        total += bodies_of.head_evaluate(
            model.decoder, model.weights(model.head), batch, inputs[-1], numerics.loss_chunk, scratch
        )
    return total
