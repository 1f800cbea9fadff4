"""Generation with a cache against the whole forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.parity.architectures import ARCHITECTURES, ORIGINAL, Architecture
from tests.parity.oracle import oracle
from tests.parity.plain import PlainModel, plain_logits, poisoned
from tests.parity.samples import pack, random_documents, random_shape, relative
from torch import Tensor

from packmule.kernels.contract import Kernels
from packmule.models import decode
from packmule.models import experts as mixture
from packmule.models.attention import runs
from packmule.models.context import TokenBatch
from packmule.models.decoder import embed_forward
from packmule.shapes import bodies, experts
from packmule.shapes.experts import Experts
from packmule.shapes.model import ModelShape


class Generator:
    """A plain loop over the decoding bodies."""

    def __init__(self, model: PlainModel, positions: int, most: int) -> None:
        shape, types = model.shape, model.types
        self.model, self.position = model, 0
        self.caches = [
            poisoned([bodies.cache_spec(layer, positions, types)])["cache"] for layer in shape.layer_shapes
        ]
        self.specs = [bodies.decode_scratch(layer, most, positions, types) for layer in shape.layer_shapes]

    def feed(self, ids: Tensor) -> Tensor:
        """Logits after the last of these tokens."""
        model, shape = self.model, self.model.shape
        x = model.inputs(len(ids))
        positions = torch.arange(self.position, self.position + len(ids), dtype=torch.int32)
        batch = TokenBatch(ids, torch.full_like(ids, -1), positions, (len(ids),), runs((len(ids),)), 0)
        embed_forward(model.decoder, model.weights(0), batch, x)
        for i, (layer, block) in enumerate(zip(shape.layer_shapes, model.openings, strict=True)):
            arguments = (model.decoder, layer, model.weights(block), x, self.caches[i], self.position)
            if layer.experts is None:
                decode.layer_decode(*arguments, poisoned(self.specs[i]), x)
            else:
                self._experts(layer.experts, i, arguments, x)
        self.position += len(ids)
        scratch = poisoned(bodies.head_decode_scratch(shape, shape.vocab, model.types))
        return decode.head_logits(model.decoder, model.weights(model.head), x, scratch)

    def _experts(self, own: Experts, index: int, arguments: tuple[Any, ...], x: Tensor) -> None:
        """A layer with experts; x is its input and its output."""
        model, hidden, types, n = self.model, self.model.shape.hidden, self.model.types, len(x)
        routed = poisoned(experts.routed(own, hidden, n, types))
        mixed = poisoned(experts.mixed(hidden, n, types))["mixed"]
        decode.route_decode(*arguments, poisoned(self.specs[index]), routed, mixed)
        for group in model.groups(index):
            mixture.experts_forward(
                model.decoder.kernels, own, group.experts, model.weights(group.index), n, routed, None,
                poisoned(bodies.experts_scratch(own, hidden, n, types, False, False)), mixed,
            )  # fmt: skip
        model.decoder.kernels.cast(x, mixed)


LIMITS = {"fp32": 1e-5, "fp64": 1e-6, "bf16-mixed": 8e-2, "bf16-wide": 8e-2}
"""Norm of the difference over the norm. In bfloat16 the two ways round otherwise (seen: 0.045)."""

FLIPPED = 0.3
"""In bfloat16 the whole forward and the cached one round otherwise; where two experts are nearly as likely,
they choose different ones (seen: 0.1). Routing itself is held to LIMITS in fp32 and fp64."""


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_cached_decoding_equals_the_whole_forward(
    kernels: Kernels, rng: random.Random, row: Architecture, precision: str
) -> None:
    shape, limit = row.shape(rng), LIMITS[precision]
    model = PlainModel(shape, precision, rng.randrange(2**31), kernels)
    if precision.startswith("bf16") and any(layer.experts for layer in shape.layer_shapes):
        limit = FLIPPED
    (document,) = random_documents(rng, shape, (170,))
    expected = plain_logits(model, pack([document]))
    generator = Generator(model, 171, 140)
    # A prefill over two tiles, single tokens, then several tokens in the middle of a cache.
    for start, stop in ((0, 140), (140, 141), (141, 142), (142, 165), (165, 170)):
        logits = generator.feed(document[start:stop])
        assert logits.dtype == torch.float32
        assert relative(logits, expected[stop - 1]) < limit
    with pytest.raises(ValueError, match="past a cache of 171"):
        generator.feed(document[:2])


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_greedy_generation_equals_transformers(
    kernels: Kernels, rng: random.Random, row: Architecture
) -> None:
    config = row.config(rng)
    shape = ModelShape.from_config(config, row.name)
    model = PlainModel(shape, "fp32", rng.randrange(2**31), kernels)
    (prompt,) = random_documents(rng, shape, (9,))
    generator, ours = Generator(model, ORIGINAL - 1, 9), []
    logits = generator.feed(prompt)
    for _ in range(20):
        ours.append(decode.sample(logits, 0.0, 1.0, None))
        logits = generator.feed(torch.tensor(ours[-1:]))
    twin, ids = oracle(model, config), prompt[None]
    for token in ours:
        # Teacher-forced, so one near-tie cannot derail the rest.
        best = twin(input_ids=ids).logits[0, -1]
        assert float(best.max() - best[token]) < 1e-4
        ids = torch.cat((ids, torch.tensor([[token]])), 1)


def test_a_rerun_gives_the_same_bits(kernels: Kernels, rng: random.Random) -> None:
    shape = random_shape(rng, tied=False, grouped=False)
    model = PlainModel(shape, "bf16-mixed", rng.randrange(2**31), kernels)
    (prompt,) = random_documents(rng, shape, (30,))
    first, second = (Generator(model, 30, 30).feed(prompt) for _ in range(2))
    assert torch.equal(first, second)
