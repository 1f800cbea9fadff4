"""A whole step as a plain loop over the task bodies, everything resident: the engine's reference.

Every buffer is filled with 0xFF bytes (NaN in every float type) before a body gets it, so a body
that reads what it was not given shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packmule.kernels.contract import Kernels
from packmule.models import decoder as bodies_of
from packmule.models.context import Decoder, TokenBatch
from packmule.models.norms import norm_forward
from packmule.models.views import TORCH_DTYPES, views
from packmule.shapes import bodies
from packmule.shapes.layout import TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Numerics

Named = dict[str, Tensor]

TYPES = {**bodies.DTYPES, "bf16-wide": replace(bodies.DTYPES["bf16-mixed"], product="float32")}
"""Dtypes by name: those of the precisions, and bf16-mixed with products in float32."""


def precision_of(numerics: Numerics) -> str:
    """The name in TYPES of what a run computes in."""
    return next(name for name, types in TYPES.items() if types == bodies.dtypes(numerics))


def poisoned(specs: Sequence[TensorSpec]) -> Named:
    """Fresh tensors full of NaN, in one buffer."""
    place = layout(specs)
    return views(torch.full((place.bytes,), 0xFF, dtype=torch.uint8), place)


class PlainModel:
    """Parameters per block in the master dtype, random by seed; `decoder` is what the bodies need."""

    def __init__(
        self, shape: ModelShape, precision: str, seed: int, kernels: Kernels, positions: int = 256
    ) -> None:
        self.shape, self.precision, self.types = shape, precision, TYPES[precision]
        self.blocks = shape.blocks()
        generator = torch.Generator().manual_seed(seed)
        self.params: list[Named] = []
        for block in self.blocks:
            named: Named = {}
            for p in block.parameters:
                value = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                value = 1 + 0.1 * value if p.role == "norm" else value * p.shape[-1] ** -0.5
                # Through float32, so that models of one seed agree in every precision.
                named[p.name] = value.float().to(TORCH_DTYPES[self.types.master])
            self.params.append(named)
        self.decoder = Decoder.create(kernels, shape, self.types, positions)

    def weights(self, block: int) -> Named:
        """The compute weights a block's bodies read, a tied head's shared one included."""
        named = dict(self.params[block])
        shared = self.blocks[block].shared
        if shared is not None:
            named["weight"] = self.params[shared]["weight"]
        return {name: value.to(TORCH_DTYPES[self.types.compute]) for name, value in named.items()}

    def inputs(self, tokens: int) -> Tensor:
        """A poisoned residual stream."""
        return poisoned([bodies.input_spec(self.shape, tokens, self.types)])["x"]


def forward(model: PlainModel, batch: TokenBatch, capacity: int) -> tuple[list[Tensor], list[Named]]:
    """The input of every layer and of the head, and what each layer saved."""
    decoder, shape, types = model.decoder, model.shape, model.types
    inputs, saves = [model.inputs(capacity)], []
    bodies_of.embed_forward(decoder, model.weights(0), batch, inputs[0])
    for i in range(1, shape.layers + 1):
        inputs.append(model.inputs(capacity))
        layer, weights = shape.layer(i), model.weights(i)
        saves.append(poisoned(bodies.layer_saved(layer, capacity, types)))
        scratch = poisoned(bodies.layer_forward_scratch(layer, capacity, types))
        bodies_of.layer_forward(decoder, layer, weights, batch, inputs[i - 1], saves[-1], scratch, inputs[i])
    return inputs, saves


def plain_step(
    model: PlainModel,
    batches: Sequence[TokenBatch],
    chunk: int = 64,
    recompute: Sequence[bool] | None = None,
    capacity: int | None = None,
) -> tuple[float, list[Named]]:
    """Mean loss over all targets and its gradient by block, depth first: micro-batch 0, then 1, ...

    Args:
        recompute: per layer; by default nothing is recomputed.
        capacity: tokens the buffers are sized for; by default those of the longest batch.
    """
    decoder, shape, types = model.decoder, model.shape, model.types
    capacity = capacity or max(batch.tokens for batch in batches)
    recompute = recompute or [False] * shape.layers
    scale = 1.0 / max(1, sum(batch.targets_count for batch in batches))
    grads = [poisoned(block.specs(types.gradient)) for block in model.blocks]
    reaching: list[Tensor] = []
    total, head = 0.0, shape.layers + 1
    for micro, batch in enumerate(batches):
        first = micro == 0
        inputs, saves = forward(model, batch, capacity)
        dx, head_grads = model.inputs(capacity), dict(grads[head])
        if shape.tied:
            head_grads["weight"] = grads[0]["weight"]
        scratch = poisoned(bodies.head_scratch(shape, chunk, types, train=True))
        weights = model.weights(head)
        loss, _ = bodies_of.head_loss(
            decoder, weights, batch, inputs[-1], scale, chunk, dx, head_grads, scratch, first
        )
        total += loss
        for i in range(shape.layers, 0, -1):
            scratch = poisoned(bodies.layer_backward_scratch(shape.layer(i), capacity, types))
            if recompute[i - 1]:
                saves[i - 1] = poisoned(bodies.layer_saved(shape.layer(i), capacity, types))
            dy, dx = dx, (dx if i % 2 else model.inputs(capacity))
            bodies_of.layer_backward(
                decoder, shape.layer(i), model.weights(i), batch, inputs[i - 1], saves[i - 1], scratch,
                dy, dx, grads[i], first, recompute[i - 1],
            )  # fmt: skip
        reaching.append(dx)
    for micro, batch in enumerate(batches):
        bodies_of.embed_backward(
            decoder, reaching[micro], batch, grads[0]["weight"], micro == 0 and not shape.tied
        )
    return total * scale, grads


def plain_logits(model: PlainModel, batch: TokenBatch) -> Tensor:
    """[N, V] in the compute dtype."""
    inputs, _ = forward(model, batch, batch.tokens)
    weights = model.weights(model.shape.layers + 1)
    normed, norm = model.inputs(batch.tokens), model.shape.norm
    saved = poisoned(norm.saved("norm", batch.tokens, model.types.statistic))
    norm_forward(model.decoder.kernels, norm, weights, "norm", inputs[-1], normed, saved)
    return normed @ weights["weight"].t()
