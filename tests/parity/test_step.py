"""The bodies against transformers' autograd, and against themselves arranged differently."""

from __future__ import annotations

import random

import pytest
import torch
from tests.parity.architectures import ARCHITECTURES, Architecture
from tests.parity.oracle import oracle_step
from tests.parity.plain import PlainModel, forward, plain_logits, plain_step, poisoned
from tests.parity.samples import pack, random_documents, random_shape, relative

from packmule.kernels.contract import Kernels
from packmule.models import decoder as bodies_of
from packmule.shapes import bodies
from packmule.shapes.model import ModelShape

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
LENGTHS = (7, 150, 150, 40, 1, 129, 40)
"""A one-token document, equal neighbors, and tiles that end in the middle and just after."""


def same_bits(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


BY_ROW = pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)


@BY_ROW
@pytest.mark.parametrize("tied", (False, True))
def test_logits_loss_and_every_gradient_equal_transformers(
    kernels: Kernels, rng: random.Random, row: Architecture, tied: bool
) -> None:
    """In float64 and in float32, by one set of weights."""
    config = row.config(rng, tied)
    shape, seed = ModelShape.from_config(config, row.name), rng.randrange(2**31)
    documents, chunk = random_documents(rng, shape, LENGTHS), rng.randint(5, 600)
    batch = pack(documents)
    exact: list[dict[str, torch.Tensor]] = []
    for precision, limit in TOLERANCE.items():
        model = PlainModel(shape, precision, seed, kernels)
        loss, grads = plain_step(model, [batch], chunk=chunk)
        expected_loss, expected, logits = oracle_step(model, config, documents)
        exact = exact or expected
        assert loss == pytest.approx(expected_loss, rel=limit)
        ours = plain_logits(model, batch).split(batch.lengths)
        for mine, theirs in zip(ours, logits, strict=True):
            assert relative(mine, theirs) < limit
            assert float((mine - theirs).abs().max()) < limit * max(1.0, float(theirs.abs().max()))
        for block, named in zip(model.blocks, expected, strict=True):
            assert named.keys() == grads[block.index].keys()
            # What is 0 in exact arithmetic (the bias of keys that neither turn nor are normed) is rounding
            # on both sides: errors count against the block's largest gradient too.
            largest = max(float(grad.norm()) for grad in named.values())
            for name, grad in named.items():
                mine, theirs = grads[block.index][name], exact[block.index][name]
                # float32 is not exact on either side: the oracle's own error comes on top of the limit.
                own = float((grad - theirs).norm())
                allowed = own + limit * max(float(grad.norm()), 1e-2 * largest)
                assert float((mine - grad).norm()) < allowed, (precision, block.name, name)
                assert float((mine - grad).abs().max()) < 2 * limit, (precision, block.name, name)


@pytest.mark.parametrize("tied", (False, True))
def test_token_weighted_accumulation_does_not_depend_on_the_split(
    kernels: Kernels, rng: random.Random, tied: bool
) -> None:
    shape = random_shape(rng, tied, grouped=True)
    model = PlainModel(shape, "fp64", rng.randrange(2**31), kernels)
    documents = random_documents(rng, shape, [rng.randint(3, 200) for _ in range(8)])
    loss, grads = plain_step(model, [pack(documents)])
    for split in ([1] * 8, [3, 5]):
        at, batches = 0, []
        for count in split:
            batches.append(pack(documents[at : at + count]))
            at += count
        other_loss, other = plain_step(model, batches, chunk=32)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        for named, theirs in zip(grads, other, strict=True):
            for name in named:
                assert relative(theirs[name], named[name]) < 1e-10


@BY_ROW
def test_recompute_capacity_and_rerun_give_the_same_bits(
    kernels: Kernels, rng: random.Random, row: Architecture
) -> None:
    shape, precision = row.shape(rng), rng.choice(("fp32", "bf16-mixed", "bf16-wide", "fp64"))
    model = PlainModel(shape, precision, rng.randrange(2**31), kernels)
    batches = [pack(random_documents(rng, shape, lengths)) for lengths in ((60, 60, 9), (140, 33))]
    loss, grads = plain_step(model, batches)
    layers = shape.layers
    mixed = [i % 2 == 0 for i in range(layers)]
    for recompute, capacity in (([False] * layers, None), ([True] * layers, None), (mixed, 400)):
        again_loss, again = plain_step(model, batches, recompute=recompute, capacity=capacity)
        assert again_loss == loss
        assert same_bits(again, grads)


def test_loss_chunks_agree_in_float64(kernels: Kernels, rng: random.Random) -> None:
    shape = random_shape(rng, tied=True, grouped=False)
    model = PlainModel(shape, "fp64", rng.randrange(2**31), kernels)
    batch = pack(random_documents(rng, shape, (50, 31)))
    loss, grads = plain_step(model, [batch], chunk=batch.tokens)
    for chunk in (1, 7, 80):
        other_loss, other = plain_step(model, [batch], chunk=chunk)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        for named, theirs in zip(grads, other, strict=True):
            for name in named:
                assert relative(theirs[name], named[name]) < 1e-11


@BY_ROW
@pytest.mark.parametrize("narrow", ("bf16-mixed", "bf16-wide"))
def test_bf16_gradients_stay_near_those_of_fp32(
    kernels: Kernels, rng: random.Random, row: Architecture, narrow: str
) -> None:
    """A rounding is not told from a fault by its size: where a softmax is sharp, or two experts are nearly
    equal, the gradient of a random model turns by half and more on bf16's last bit. What it does turn by
    is measured: the same model with weights nudged by up to four bf16 roundings (2**-6), in float32.
    bf16's own error is some 0.5 of that change, up to 1.7 where tokens change their expert; over the
    whole gradient up to 0.5 and 1.0."""
    shape, seed = row.shape(rng), rng.randrange(2**31)
    low, high = (PlainModel(shape, p, seed, kernels) for p in (narrow, "fp32"))
    batches = [pack(random_documents(rng, shape, lengths)) for lengths in ((140, 20), (77,))]
    low_loss, low_grads = plain_step(low, batches)
    loss, grads = plain_step(high, batches)
    nudges = [nudged(PlainModel(shape, "fp32", seed, kernels), rng.randrange(2**31)) for _ in range(3)]
    turned = [plain_step(model, batches)[1] for model in nudges]
    assert low_loss == pytest.approx(loss, rel=1e-2)
    for block, named, theirs, *others in zip(low.blocks, low_grads, grads, *turned, strict=True):
        for name in named:
            assert named[name].dtype == torch.float32 and bool(named[name].isfinite().all())
            # What is added to every key alike moves no probability: without a norm or a turn after it the
            # gradient of such a bias is 0, and what is computed is rounding.
            if block.kind == "experts" or name in ("router.weight", "k.bias"):
                continue
            change = max(relative(other[name], theirs[name]) for other in others)
            assert 1e-4 < relative(named[name], theirs[name]) < 4 * change, (block.name, name)
    change = max(relative(flat(other), flat(grads)) for other in turned)
    assert relative(flat(low_grads), flat(grads)) < 2 * change


def flat(grads: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """A whole gradient as one vector."""
    return torch.cat([grad.flatten() for named in grads for grad in named.values()])


def nudged(model: PlainModel, seed: int) -> PlainModel:
    """The model with every weight changed by up to 2**-6 of itself."""
    generator = torch.Generator().manual_seed(seed)
    for named in model.params:
        for value in named.values():
            value *= 1 + (2 * torch.rand(value.shape, generator=generator) - 1) * 2**-6
    return model


def has_experts(shape: ModelShape) -> bool:
    return any(layer.experts is not None for layer in shape.layer_shapes)


@BY_ROW
def test_a_document_never_sees_another(kernels: Kernels, rng: random.Random, row: Architecture) -> None:
    """To the bit, but where experts run all documents' tokens in one product: how many there are may
    change how each is rounded."""
    shape, precision = row.shape(rng), rng.choice(("fp32", "bf16-mixed", "bf16-wide"))
    precision, limit = ("fp64", 1e-13) if has_experts(shape) else (precision, 0.0)
    model = PlainModel(shape, precision, rng.randrange(2**31), kernels)
    one, other, two = random_documents(rng, shape, (130, 130, 55))
    for first in (one, other):
        assert len(first) == 130
    before, after = (plain_logits(model, pack([first, two, two])) for first in (one, other))
    assert not torch.equal(before[:130], after[:130])
    assert relative(before[130:], after[130:]) <= limit
    # Equal neighbors share products: their own bits do not move either.
    before, after = (plain_logits(model, pack([first, one, two])) for first in (one, other))
    assert relative(before[130:], after[130:]) <= limit


@BY_ROW
def test_evaluation_is_the_training_loss_to_the_last_bit(
    kernels: Kernels, rng: random.Random, row: Architecture
) -> None:
    shape, precision = row.shape(rng), rng.choice(("fp32", "bf16-mixed", "bf16-wide", "fp64"))
    model = PlainModel(shape, precision, rng.randrange(2**31), kernels)
    batch = pack(random_documents(rng, shape, (90, 12)))
    inputs, _ = forward(model, batch, batch.tokens)
    weights = model.weights(model.head)
    results = []
    for train in (True, False):
        scratch = poisoned(bodies.head_scratch(shape, 25, model.types, train))
        if train:
            grads = {
                **poisoned(model.blocks[-1].specs(model.types.gradient)),
                **poisoned(model.blocks[0].specs(model.types.gradient)),
            }
            dx = model.inputs(batch.tokens)
            results.append(
                bodies_of.head_loss(
                    model.decoder, weights, batch, inputs[-1], 0.5, 25, dx, grads, scratch, True
                )
            )
        else:
            tally = bodies_of.head_evaluate(model.decoder, weights, batch, inputs[-1], 25, scratch)
            results.append((tally.loss, tally.targets))
    assert results[0] == results[1]
    assert results[0][1] == 89 + 11


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed", "bf16-wide"))
def test_rows_beyond_the_tokens_are_left_alone(kernels: Kernels, rng: random.Random, precision: str) -> None:
    shape = random_shape(rng, tied=False, grouped=True)
    model = PlainModel(shape, precision, rng.randrange(2**31), kernels)
    batch, capacity = pack(random_documents(rng, shape, (31, 12))), 50
    inputs, saves = forward(model, batch, capacity)
    rows = [*inputs, *(saves[0][name] for name in ("q", "k", "attention", "middle", "gate"))]
    for tensor in rows:
        assert bool(torch.isfinite(tensor[: batch.tokens]).all())
        assert bool(torch.isnan(tensor[batch.tokens :]).all())
    assert bool(torch.isnan(saves[0]["lse"][shape.heads * batch.tokens :]).all())


def test_a_gradient_handed_on_in_place_has_the_same_bits(kernels: Kernels, rng: random.Random) -> None:
    shape = random_shape(rng, tied=False, grouped=False)
    model = PlainModel(shape, "bf16-mixed", rng.randrange(2**31), kernels)
    batch = pack(random_documents(rng, shape, (64, 20)))
    results = []
    for in_place in (False, True):
        inputs, saves = forward(model, batch, batch.tokens)
        dy = torch.ones_like(inputs[0]) / 7
        dx = dy if in_place else model.inputs(batch.tokens)
        grads = poisoned(model.blocks[1].specs(model.types.gradient))
        scratch = poisoned(bodies.layer_backward_scratch(shape.layer(1), batch.tokens, model.types))
        bodies_of.layer_backward(
            model.decoder,
            shape.layer(1),
            model.weights(1),
            batch,
            inputs[0],
            saves[0],
            scratch,
            dy,
            dx,
            grads,
            True,
            False,
        )
        results.append({"dx": dx, **grads})
    assert same_bits(results[:1], results[1:])
