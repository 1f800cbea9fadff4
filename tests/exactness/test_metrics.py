"""What a run reports besides its loss: evaluation metrics and the gradient's noise, against plain code."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.exactness.runs import make_batch, make_case, make_plan, progress, step_engine, tiny_shape
from tests.exactness.test_phases import NEEDS, TOKEN_BYTES, evaluation_rows, groups
from tests.fault.recording_disk import RecordingDisk
from tests.parity.plain import plain_logits, plain_step

from packmule.kernels.contract import Kernels
from packmule.models.context import TokenBatch
from packmule.optim.noise import estimate
from packmule.spec.plan import Placement

RUN = Path("/run")


def test_accuracy_and_bits_per_byte_are_those_of_whole_logits(kernels: Kernels, seed: int) -> None:
    plan = make_plan(precision="fp64", micro_rows=(2, 1))
    case = make_case(tiny_shape(tied=False), plan, 0, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
    metrics = engine.evaluate(groups(engine, evaluation_rows(case)), token_bytes=TOKEN_BYTES).metrics()
    without = engine.evaluate(groups(engine, evaluation_rows(case))).metrics()
    engine.close()

    batch = TokenBatch.from_batch(make_batch(evaluation_rows(case)))
    logits, known = plain_logits(case.model(kernels), batch), batch.targets >= 0
    logits, targets = logits[known], batch.targets[known]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    sizes = TOKEN_BYTES[targets]
    assert metrics["loss"] == pytest.approx(float(losses.mean()), rel=1e-12)
    assert metrics["perplexity"] == pytest.approx(math.exp(float(losses.mean())), rel=1e-12)
    assert metrics["accuracy"] == float((logits.argmax(1) == targets).double().mean())
    nats = float(losses[sizes > 0].sum())
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / int(sizes.sum()), rel=1e-12)
    assert without == {key: value for key, value in metrics.items() if key != "bits_per_byte"}


@pytest.mark.parametrize(
    ("order", "update", "placement"),
    [
        ("breadth", "after-backward", Placement(state="ram", weights="state")),
        ("depth", "after-backward", Placement(state="disk", weights="ram")),
        ("breadth", "on-backward", Placement(state="disk", weights="state")),
        ("breadth", "on-fetch", Placement(state="disk", weights="disk", gradients="disk", inputs="disk")),
    ],
)
def test_noise_is_that_of_each_micro_batchs_own_norm_gradients(
    order: str, update: str, placement: Placement, kernels: Kernels, seed: int
) -> None:
    plan = make_plan(
        precision="fp64", micro_rows=(2, 1, 3), order=order, update=update, placement=placement, clip=None
    )
    case = make_case(tiny_shape(tied=True), plan, 0, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    step_engine(engine, case.data, 0)
    found = engine.runtime.state.outcome().noise
    engine.settle(progress(plan, 1))
    engine.close()

    model = case.model(kernels)
    batches = [TokenBatch.from_batch(batch) for batch in case.data.batches(0, plan.numerics)]
    total = sum(batch.targets_count for batch in batches)

    def square(chosen: list[TokenBatch]) -> float:
        _, grads = plain_step(model, chosen)
        named = [(p, grads[b.index][p.name]) for b in model.blocks for p in b.parameters]
        return sum(float(value.square().sum()) for p, value in named if p.role == "norm")

    parts = [(square([batch]) * (batch.targets_count / total) ** 2, batch.targets_count) for batch in batches]
    expected = estimate(parts, square(batches))
    assert found is not None and expected is not None
    assert found.trace == pytest.approx(expected.trace, rel=1e-9)
    assert found.square == pytest.approx(expected.square, rel=1e-9, abs=1e-18)


def test_a_step_of_one_micro_batch_reports_no_noise(kernels: Kernels, seed: int) -> None:
    case = make_case(tiny_shape(tied=True), make_plan(micro_rows=(3,)), 0, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    step_engine(engine, case.data, 0)
    assert engine.runtime.state.outcome().noise is None
    engine.close()
