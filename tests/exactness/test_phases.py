"""Evaluation and generation give the same bits wherever weights and state lie."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.exactness.runs import (
    Case,
    make_batch,
    make_case,
    make_plan,
    plain_run,
    progress,
    run_steps,
    step_engine,
    tiny_shape,
)
from tests.fault.recording_disk import RecordingDisk
from tests.parity.plain import PlainModel, forward, head_evaluate, plain_logits

from packmule.engine.engine import Engine, Needs
from packmule.kernels.contract import Kernels
from packmule.models.context import TokenBatch
from packmule.spec.batch import Batch
from packmule.spec.plan import Placement
from packmule.spec.tally import Tally

RUN = Path("/run")
STEPS = 2
ROWS = 9
POSITIONS = 24
NEEDS = Needs(evaluation_rows=(ROWS,), sample_tokens=POSITIONS)
NEAR_TIE = 1e-4
"""Logits of cached decoding and of a whole forward may differ by this much in float32."""

PLACEMENTS = [
    Placement(state=state, weights=weights, gradients=gradients, inputs="disk")
    for state, weights, gradients in product(("ram", "disk"), ("state", "ram", "disk"), ("ram", "disk"))
]
UPDATES = ("after-backward", "on-fetch")
NO_STOP: frozenset[int] = frozenset()
TOKEN_BYTES = torch.arange(97, dtype=torch.int32) % 5
"""Of made-up tokens; every fifth is special."""


def cases(precision: str, tied: bool, parts: int, seed: int, kernels: Kernels) -> Iterator[Case]:
    """One run under every placement, two micro-batches a step."""
    for index, placement in enumerate(PLACEMENTS):
        plan = make_plan(
            precision=precision,
            micro_rows=(2, 1),
            placement=placement,
            update=UPDATES[index % 2],
            prefetch=index % 3,
            order="depth" if index % 4 == 0 and placement.gradients == "ram" and parts == 1 else "breadth",
            steps=STEPS,
            vocabulary_parts=parts,
        )
        yield make_case(tiny_shape(tied), plan, 0, seed, kernels)


def trained(case: Case, kernels: Kernels) -> Engine:
    """After a few steps, settled."""
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
    run_steps(engine, case.data, 0, STEPS)
    return engine


def evaluation_rows(case: Case) -> list[list[list[int]]]:
    return case.data.rows(1000, ROWS, case.plan.numerics.max_seq_length)


def groups(engine: Engine, rows: list[list[list[int]]]) -> Iterator[list[Batch]]:
    """The rows as the engine wants them."""
    start = 0
    for group in engine.evaluation_groups(ROWS):
        batches = []
        for count in group:
            batches.append(make_batch(rows[start : start + count]))
            start += count
        yield batches
    assert start == len(rows)


def plain_model(case: Case, kernels: Kernels) -> PlainModel:
    """The model after the same steps as a plain loop."""
    model = case.model(kernels)
    plain_run(model, case.plan.numerics, case.data, STEPS, kernels)
    return model


def plain_evaluate(case: Case, model: PlainModel) -> Tally:
    """The sums over the same micro-batches, every tensor resident."""
    numerics = case.plan.numerics
    rows, size = evaluation_rows(case), max(numerics.micro_rows)
    total = Tally()
    for start in range(0, ROWS, size):
        batch = TokenBatch.from_batch(make_batch(rows[start : start + size]))
        inputs, _ = forward(model, batch, max(numerics.micro_tokens))
        total += head_evaluate(model, batch, inputs[-1], numerics.loss_chunk, TOKEN_BYTES)
    return total


PARTS = pytest.mark.parametrize("parts", (1, 4))
"""Of the vocabulary."""


@PARTS
@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed"))
def test_evaluation_is_the_plain_forward_wherever_things_lie(
    precision: str, parts: int, kernels: Kernels, seed: int
) -> None:
    expected = None
    for case in cases(precision, seed % 2 == 0, parts, seed, kernels):
        expected = expected or plain_evaluate(case, plain_model(case, kernels))
        engine = trained(case, kernels)
        for _ in range(2):
            found = engine.evaluate(groups(engine, evaluation_rows(case)), token_bytes=TOKEN_BYTES)
            assert found == expected, case.plan
        engine.close()


@PARTS
@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed"))
def test_generation_is_the_same_wherever_things_lie(
    precision: str, parts: int, kernels: Kernels, seed: int
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(97) for _ in range(7)]
    found = []
    for case in cases(precision, seed % 2 == 1, parts, seed, kernels):
        engine = trained(case, kernels)
        greedy = list(engine.generate(prompt, NO_STOP))
        drawn = list(engine.generate(prompt, NO_STOP, temperature=0.8, top_p=0.9, seed=seed))
        engine.close()
        found.append((greedy, drawn))
    assert len(found[0][0]) == POSITIONS - len(prompt) + 1
    assert all(other == found[0] for other in found)


@PARTS
def test_greedy_generation_takes_the_most_likely_token(parts: int, kernels: Kernels, seed: int) -> None:
    rng = random.Random(seed)
    case = next(cases("fp32", True, parts, seed, kernels))
    model = plain_model(case, kernels)
    engine = trained(case, kernels)
    for length in (1, 9, POSITIONS - 1):
        prompt = [rng.randrange(97) for _ in range(length)]
        ids = list(prompt)
        for token in engine.generate(prompt, NO_STOP):
            batch = make_batch([[ids]])
            best = plain_logits(model, TokenBatch.from_batch(batch))[-1]
            top = best.topk(2)
            if float(top.values[0] - top.values[1]) > NEAR_TIE:
                assert token == int(top.indices[0])
            else:
                assert float(top.values[0] - best[token]) < NEAR_TIE
            ids.append(token)
        assert len(ids) == POSITIONS + 1
    engine.close()


def test_evaluation_and_generation_leave_training_as_it_was(kernels: Kernels, seed: int) -> None:
    for placement, update in zip(PLACEMENTS, UPDATES * len(PLACEMENTS), strict=False):
        plan = make_plan(
            micro_rows=(2, 1),
            placement=placement,
            update=update,
            commit_steps=2,
            steps=4,
            vocabulary_parts=1 + 2 * (seed % 2),
        )
        case = make_case(tiny_shape(True), plan, 4, seed, kernels)
        disk = RecordingDisk()
        case.start(RUN, kernels, disk)
        engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
        trace = []
        for step in (0, 2):
            trace += run_steps(engine, case.data, step, step + 2)
            engine.evaluate(groups(engine, evaluation_rows(case)))
            list(engine.generate([1, 2, 3], NO_STOP))
        engine.close()
        assert trace == case.expected.trace, plan.placement
        assert case.state(RUN, kernels, disk) == (4, case.expected.images[-1]), plan.placement


def test_nothing_is_evaluated_while_an_update_is_pending(kernels: Kernels, seed: int) -> None:
    plan = make_plan(update="on-fetch")
    case = make_case(tiny_shape(True), plan, 0, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
    step_engine(engine, case.data, 0)
    with pytest.raises(RuntimeError, match="settle first"):
        engine.evaluate(iter(()))
    with pytest.raises(RuntimeError, match="settle first"):
        next(engine.generate([1], NO_STOP))
    engine.settle(progress(plan, 1))
    engine.evaluate(iter(()))
    engine.close()
