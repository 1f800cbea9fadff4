"""Every architecture through the engine: streamed, stopped and resumed, it gives the plain loop's bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.exactness.runs import Case, finish, make_batch, make_case, make_plan, plain_run, run_steps
from tests.fault.recording_disk import RecordingDisk
from tests.parity.architectures import ARCHITECTURES, Architecture
from tests.parity.plain import plain_logits

from packmule.engine.engine import Needs
from packmule.kernels.contract import Kernels
from packmule.models.context import TokenBatch
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Placement

RUN = Path("/run")
STEPS = 3
POSITIONS = 15
SHORT = 16
"""Positions before a longer context: some documents are longer, the generated text is not."""
NEAR_TIE = 1e-4


def random_case(row: Architecture, rng: random.Random, seed: int, kernels: Kernels) -> Case:
    """A plan that streams everything; state, weights or gradients by chance."""
    config = row.config(rng)
    if "original_max_position_embeddings" in config:
        config["original_max_position_embeddings"] = SHORT
    shape = ModelShape.from_config(config, row.name)
    placement = Placement(
        state="disk",
        weights=rng.choice(("state", "disk")),
        gradients=rng.choice(("ram", "disk")),
        inputs="disk",
    )
    plan = make_plan(
        precision=rng.choice(("fp32", "bf16-mixed", "bf16-wide", "fp64")),
        micro_rows=(2, 1),
        placement=placement,
        update=rng.choice(("after-backward", "on-fetch")),
        recompute=tuple(rng.random() < 0.5 for _ in range(shape.layers)),
        steps=STEPS,
        vocabulary_parts=rng.choice((1, 3)),
    )
    return make_case(shape, plan, STEPS, seed, kernels)


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_a_streamed_run_that_is_resumed_gives_the_bits_of_the_plain_loop(
    row: Architecture, kernels: Kernels, rng: random.Random, seed: int
) -> None:
    case, disk = random_case(row, rng, seed, kernels), RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    first = run_steps(engine, case.data, 0, STEPS - 1)
    engine.close()
    step, rest = finish(case, RUN, kernels, disk)
    assert step == STEPS - 1
    assert first + rest == case.expected.trace
    assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_generation_takes_the_most_likely_token_of_a_whole_forward(
    row: Architecture, kernels: Kernels, rng: random.Random, seed: int
) -> None:
    case, disk = random_case(row, rng, seed, kernels), RecordingDisk()
    model = case.model(kernels)
    plain_run(model, case.plan.numerics, case.data, 1, kernels)
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=Needs(sample_tokens=POSITIONS))
    run_steps(engine, case.data, 0, 1)
    ids = [rng.randrange(case.shape.vocab) for _ in range(5)]
    # A rounding may send a token to another expert.
    narrow = 1.0 if any(layer.experts for layer in case.shape.layer_shapes) else 0.1
    tie = NEAR_TIE if case.plan.numerics.precision == "fp32" else narrow
    for token in engine.generate(ids, frozenset()):
        best = plain_logits(model, TokenBatch.from_batch(make_batch([[ids]])))[-1].float()
        assert float(best.max() - best[token]) <= tie
        ids = [*ids, token]
    assert len(ids) == POSITIONS + 1
    engine.close()
