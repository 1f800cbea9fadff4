"""A vocabulary cut into parts against transformers' autograd, and against the whole one."""

from __future__ import annotations

import random

import pytest
import torch
from tests.parity.architectures import ARCHITECTURES, Architecture
from tests.parity.oracle import oracle_step
from tests.parity.plain import (
    PlainModel,
    embed_backward,
    forward,
    head_evaluate,
    head_loss,
    joined,
    plain_step,
    poisoned,
)
from tests.parity.samples import pack, random_documents, random_shape, relative

from packmule.kernels.contract import Kernels
from packmule.models import decoder as bodies_of
from packmule.shapes.model import ModelShape

LENGTHS = (7, 150, 1, 129)
LIMITS = {"fp32": 1e-5, "bf16-mixed": 0.06, "bf16-wide": 0.06}
"""Of a whole gradient's distance: bf16 rounds another residual stream."""


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
@pytest.mark.parametrize("tied", (False, True))
def test_loss_and_every_gradient_equal_transformers(
    kernels: Kernels, rng: random.Random, row: Architecture, tied: bool
) -> None:
    config = row.config(rng, tied)
    shape, seed = ModelShape.from_config(config, row.name), rng.randrange(2**31)
    documents, chunk = random_documents(rng, shape, LENGTHS), rng.randint(5, 600)
    cut = shape.cut(rng.choice((2, 3, 7, shape.vocab)))
    loss, grads = plain_step(PlainModel(cut, "fp64", seed, kernels), [pack(documents)], chunk=chunk)
    expected_loss, expected, _ = oracle_step(PlainModel(shape, "fp64", seed, kernels), config, documents)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for named, theirs in zip(joined(cut, grads), expected, strict=True):
        assert named.keys() == theirs.keys()
        largest = max(float(grad.norm()) for grad in theirs.values())
        for name, grad in theirs.items():
            allowed = 1e-10 * max(float(grad.norm()), 1e-2 * largest)
            assert float((named[name] - grad).norm()) < allowed, name


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("precision", LIMITS)
def test_parts_come_near_the_whole_in_less_precise_numbers(
    kernels: Kernels, rng: random.Random, precision: str, tied: bool
) -> None:
    """Several micro-batches; the cut changes the order of additions and nothing else."""
    shape, seed = random_shape(rng, tied, grouped=True), rng.randrange(2**31)
    batches = [pack(random_documents(rng, shape, lengths)) for lengths in ((140, 20), (77,))]
    whole, cut = shape, shape.cut(rng.randint(2, 9))
    loss, grads = plain_step(PlainModel(whole, precision, seed, kernels), batches, chunk=64)
    other, theirs = plain_step(PlainModel(cut, precision, seed, kernels), batches, chunk=64)
    assert other == pytest.approx(loss, rel=1e-6 if precision == "fp32" else 1e-3)
    flat = [
        torch.cat([grad.flatten() for named in all_grads for grad in named.values()])
        for all_grads in (grads, joined(cut, theirs))
    ]
    assert relative(flat[1], flat[0]) < LIMITS[precision]


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed", "bf16-wide", "fp64"))
def test_evaluation_is_the_training_loss_to_the_last_bit(
    kernels: Kernels, rng: random.Random, precision: str
) -> None:
    shape = random_shape(rng, rng.random() < 0.5, grouped=True).cut(rng.randint(2, 9))
    model = PlainModel(shape, precision, rng.randrange(2**31), kernels)
    batch = pack(random_documents(rng, shape, (90, 12)))
    x, chunk = forward(model, batch, batch.tokens)[0][-1], 25
    grads = [poisoned(block.specs(model.types.gradient)) for block in model.blocks]
    loss = head_loss(model, batch, x, 0.5, chunk, model.inputs(batch.tokens), grads, True)
    tally = head_evaluate(model, batch, x, chunk)
    assert tally.loss == loss
    assert tally.targets == 89 + 11
    whole = PlainModel(shape.cut(1), precision, 0, kernels)
    whole.params = joined(shape, model.params)
    expected = head_evaluate(whole, batch, x, chunk)
    assert (tally.correct, tally.targets) == (expected.correct, expected.targets)
    assert tally.loss == pytest.approx(expected.loss, rel=1e-3 if model.types.compute == "bfloat16" else 1e-6)


def test_a_part_of_the_embedding_has_the_bits_of_the_whole(kernels: Kernels, rng: random.Random) -> None:
    shape = random_shape(rng, False, grouped=False)
    cut, seed = shape.cut(rng.randint(2, shape.vocab)), rng.randrange(2**31)
    precision = rng.choice(("fp32", "bf16-mixed", "fp64"))
    whole, parted = (PlainModel(each, precision, seed, kernels) for each in (shape, cut))
    batch = pack(random_documents(rng, shape, (250, 250, 250, 30)))
    mine, theirs = (forward(model, batch, batch.tokens)[0][0] for model in (parted, whole))
    assert torch.equal(mine, theirs)
    grads = [poisoned(block.specs(parted.types.gradient)) for block in parted.blocks]
    expected = poisoned(whole.blocks[0].specs(whole.types.gradient))
    for first in (True, False):
        embed_backward(parted, mine, batch, grads, first)
        bodies_of.embed_backward(whole.decoder, theirs, batch, expected, first)
    found = torch.cat([grads[block.index]["weight"] for block in parted.embedding])
    assert torch.equal(found, expected["weight"])
