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
from packmule.models import experts as mixture
from packmule.models import vocabulary as parts_of
from packmule.models.context import Decoder, TokenBatch
from packmule.models.norms import norm_forward
from packmule.models.views import TORCH_DTYPES, views
from packmule.shapes import bodies, experts, vocabulary
from packmule.shapes.blocks import Block
from packmule.shapes.layer import LayerShape
from packmule.shapes.layout import TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Numerics
from packmule.spec.tally import Tally

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
        whole: list[Named] = []
        for block in shape.cut(1).blocks():
            named: Named = {}
            for p in block.parameters:
                value = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                constant = p.role in ("norm", "bias")
                value = p.start + 0.1 * value if constant else value * p.shape[-1] ** -0.5
                # Through float32, so that models of one seed agree in every precision.
                named[p.name] = value.float().to(TORCH_DTYPES[self.types.master])
            whole.append(named)
        self.params = [_rows_of(block, whole[block.whole.index]) for block in self.blocks]
        self.decoder = Decoder.create(kernels, shape, self.types, positions)

    def weights(self, block: int) -> Named:
        """The compute weights a block's bodies read, a tied head's shared one included."""
        named = dict(self.params[block])
        shared = self.blocks[block].shared
        if shared is not None:
            named["weight"] = self.params[shared]["weight"]
        return {name: value.to(TORCH_DTYPES[self.types.compute]) for name, value in named.items()}

    def head_weights(self, part: int) -> Named:
        """What the head's bodies read at a part of a cut vocabulary."""
        return {**self.weights(self.head), "weight": self.weights(part)["weight"]}

    @property
    def embedding(self) -> list[Block]:
        """The blocks of the embedding."""
        return [block for block in self.blocks if block.kind == "embed"]

    @property
    def head_parts(self) -> list[Block]:
        """The blocks of the head's matrix where the vocabulary is cut."""
        kind = "embed" if self.shape.tied else "logits"
        return [block for block in self.blocks if block.kind == kind]

    @property
    def head(self) -> int:
        """The head's block."""
        return len(self.blocks) - 1

    @property
    def openings(self) -> list[int]:
        """Every layer's first block."""
        return [block.index for block in self.blocks if block.kind == "layer"]

    def groups(self, layer: int) -> list[Block]:
        """The blocks with a layer's experts."""
        return [block for block in self.blocks if block.layer == layer and block.kind == "experts"]

    def inputs(self, tokens: int) -> Tensor:
        """A poisoned residual stream."""
        return poisoned([bodies.input_spec(self.shape, tokens, self.types)])["x"]


def _rows_of(block: Block, whole: Named) -> Named:
    """A block's parameters out of those of the whole block."""
    found = {}
    for p in block.parameters:
        start = block.first_row(p.name)
        found[p.name] = whole[p.name][start : start + p.shape[0]].clone()
    return found


def joined(shape: ModelShape, named: Sequence[Named]) -> list[Named]:
    """What is given by block of a cut vocabulary, by block of a whole one."""
    found: list[Named] = [{} for _ in shape.cut(1).blocks()]
    for block, own in zip(shape.blocks(), named, strict=True):
        whole = found[block.whole.index]
        for name, value in own.items():
            whole[name] = torch.cat((whole[name], value)) if name in whole else value
    order = zip(shape.cut(1).blocks(), found, strict=True)
    return [{p.name: whole[p.name] for p in block.parameters} for block, whole in order]


class Saved(dict[str, Tensor]):
    """What a layer saved; `routed` and `experts` are those of its mixture, if it is one."""

    routed: Named
    experts: Named | None


def forward(
    model: PlainModel, batch: TokenBatch, capacity: int, balance: Tensor | None = None
) -> tuple[list[Tensor], list[Saved]]:
    """The input of every layer and of the head, and what each layer saved.

    Args:
        balance: float64 [2, E], to which the experts' loads are added.
    """
    decoder, types = model.decoder, model.types
    inputs, saves = [model.inputs(capacity)], []
    embed_forward(model, batch, inputs[0], capacity)
    for layer, block in zip(model.shape.layer_shapes, model.openings, strict=True):
        x, weights = inputs[-1], model.weights(block)
        inputs.append(model.inputs(capacity))
        saved = Saved(poisoned(bodies.layer_saved(layer, capacity, types)))
        scratch = poisoned(bodies.layer_forward_scratch(layer, capacity, types))
        saves.append(saved)
        if layer.experts is None:
            bodies_of.layer_forward(decoder, layer, weights, batch, x, saved, scratch, inputs[-1])
            continue
        saved.routed = poisoned(experts.routed(layer.experts, layer.hidden, capacity, types))
        saved.experts = poisoned(experts.experts_saved(layer.experts, capacity, types))
        mixed = poisoned(experts.mixed(layer.hidden, capacity, types))["mixed"]
        bodies_of.route_forward(
            decoder, layer, weights, batch, x, saved, scratch, saved.routed, mixed, balance
        )
        for group in model.groups(model.blocks[block].layer):
            mixture.experts_forward(
                decoder.kernels, layer.experts, group.experts, model.weights(group.index), batch.tokens,
                saved.routed, saved.experts, experts_scratch(model, layer, capacity, False, True), mixed,
            )  # fmt: skip
        decoder.kernels.cast(inputs[-1][: batch.tokens], mixed[: batch.tokens])
    return inputs, saves


def embed_forward(model: PlainModel, batch: TokenBatch, out: Tensor, capacity: int) -> None:
    """The embedding, part by part where it is cut."""
    for block in model.embedding:
        weights = model.weights(block.index)
        if model.shape.vocabulary_parts == 1:
            bodies_of.embed_forward(model.decoder, weights, batch, out)
        else:
            scratch = poisoned(bodies.embed_part_scratch(model.shape, capacity, model.types))
            parts_of.embed_forward(model.decoder, weights, block.tokens, batch, out, scratch)


def head_scores(model: PlainModel, batch: TokenBatch, x: Tensor, chunk: int) -> Named:
    """What the head's first visits find."""
    scores = poisoned(vocabulary.scores(len(x), model.types))
    for number, block in enumerate(model.head_parts):
        scratch = poisoned(
            bodies.part_scratch(model.shape, len(block.tokens), chunk, model.types, gradient=False)
        )
        parts_of.part_score(
            model.decoder, model.head_weights(block.index), block.tokens, batch, x, chunk, scores, scratch,
            number == 0,
        )  # fmt: skip
    return scores


def head_loss(
    model: PlainModel,
    batch: TokenBatch,
    x: Tensor,
    scale: float,
    chunk: int,
    dx: Tensor,
    grads: list[Named],
    first: bool,
) -> float:
    """The head's forward and backward; gradients are added to by block."""
    shape, types, head = model.shape, model.types, model.head
    if shape.vocabulary_parts == 1:
        head_grads = dict(grads[head])
        if shape.tied:
            head_grads["weight"] = grads[0]["weight"]
        scratch = poisoned(bodies.head_scratch(shape, chunk, types, train=True))
        return bodies_of.head_loss(
            model.decoder, model.weights(head), batch, x, scale, chunk, dx, head_grads, scratch, first
        )[0]
    scores = head_scores(model, batch, x, chunk)
    gathered = poisoned(vocabulary.gathered(shape.hidden, len(x), types))["dnormed"]
    for number, block in enumerate(reversed(model.head_parts)):
        scratch = poisoned(bodies.part_scratch(shape, len(block.tokens), chunk, types, gradient=True))
        parts_of.part_gradient(
            model.decoder, model.head_weights(block.index), block.tokens, batch, x, scale, chunk, scores,
            gathered, grads[block.index]["weight"], scratch, first, number == 0,
        )  # fmt: skip
    scratch = poisoned(bodies.close_scratch(shape, chunk, types))
    return parts_of.head_close(
        model.decoder, model.weights(head), batch, x, chunk, scores, gathered, dx, grads[head], scratch, first
    )[0]


def head_evaluate(
    model: PlainModel, batch: TokenBatch, x: Tensor, chunk: int, token_bytes: Tensor | None = None
) -> Tally:
    """The sums of an evaluation."""
    if model.shape.vocabulary_parts > 1:
        return parts_of.tally(batch, head_scores(model, batch, x, chunk), chunk, token_bytes)
    scratch = poisoned(bodies.head_scratch(model.shape, chunk, model.types, train=False))
    weights = model.weights(model.head)
    return bodies_of.head_evaluate(model.decoder, weights, batch, x, chunk, scratch, token_bytes)


def embed_backward(model: PlainModel, dy: Tensor, batch: TokenBatch, grads: list[Named], first: bool) -> None:
    """The embedding's, part by part where it is cut."""
    for block in model.embedding:
        if model.shape.vocabulary_parts == 1:
            bodies_of.embed_backward(model.decoder, dy, batch, grads[0], first)
        else:
            scratch = poisoned(bodies.embed_part_scratch(model.shape, len(dy), model.types))
            parts_of.embed_backward(
                model.decoder, dy, block.tokens, batch, grads[block.index], scratch, first
            )


def experts_scratch(model: PlainModel, layer: LayerShape, capacity: int, backward: bool, kept: bool) -> Named:
    """A group's temporaries."""
    assert layer.experts is not None
    return poisoned(
        bodies.experts_scratch(layer.experts, layer.hidden, capacity, model.types, backward, kept)
    )


def layer_backward(
    model: PlainModel,
    index: int,
    batch: TokenBatch,
    x: Tensor,
    saved: Saved,
    dy: Tensor,
    dx: Tensor,
    grads: Sequence[Named],
    first: bool,
    recompute: bool,
    even: Tensor | None,
) -> None:
    """All blocks of layer number `index`; `even` is the load-balancing loss's gradient."""
    layer, block, types, capacity = (
        model.shape.layer_shapes[index],
        model.openings[index],
        model.types,
        len(x),
    )
    if recompute:
        again = Saved(poisoned(bodies.layer_saved(layer, capacity, types)))
        if layer.experts is not None:
            again.routed, again.experts = saved.routed, None
        saved = again
    scratch = poisoned(bodies.layer_backward_scratch(layer, capacity, types))
    weights = model.weights(block)
    if layer.experts is None:
        bodies_of.layer_backward(
            model.decoder, layer, weights, batch, x, saved, scratch, dy, dx, grads[block], first, recompute
        )
        return
    dispatched = poisoned(experts.dispatched(layer.experts, layer.hidden, capacity, types))
    kept = saved.experts is not None
    for number, group in enumerate(reversed(model.groups(index))):
        mixture.experts_backward(
            model.decoder.kernels, layer.experts, group.experts, model.weights(group.index), batch.tokens,
            saved.routed, saved.experts, experts_scratch(model, layer, capacity, True, kept),
            dy, dispatched, grads[group.index], first, number == 0,
        )  # fmt: skip
    if even is None:
        even = torch.zeros(layer.experts.count, dtype=TORCH_DTYPES[types.statistic])
    bodies_of.route_backward(
        model.decoder, layer, weights, batch, x, saved, scratch, saved.routed, dispatched, even, dy, dx,
        grads[block], first, recompute,
    )  # fmt: skip


def plain_step(
    model: PlainModel,
    batches: Sequence[TokenBatch],
    chunk: int = 64,
    recompute: Sequence[bool] | None = None,
    capacity: int | None = None,
) -> tuple[float, list[Named]]:
    """Mean loss over all targets and its gradient by block, micro-batch 0 first, then 1, ... The
    load-balancing loss of experts is in the gradient alone.

    Args:
        recompute: per layer; by default nothing is recomputed.
        capacity: tokens the buffers are sized for; by default those of the longest batch.
    """
    shape, types = model.shape, model.types
    capacity = capacity or max(batch.tokens for batch in batches)
    recompute = recompute or [False] * shape.layers
    scale = 1.0 / max(1, sum(batch.targets_count for batch in batches))
    grads = [poisoned(block.specs(types.gradient)) for block in model.blocks]
    reaching: list[Tensor] = []
    total, even = 0.0, None
    mixtures = [layer.experts for layer in shape.layer_shapes if layer.experts is not None]
    balance = torch.zeros(2, mixtures[0].count, dtype=torch.float64) if mixtures else None
    passed = [forward(model, batch, capacity, balance) for batch in batches]
    if balance is not None:
        rows = sum(batch.tokens for batch in batches) * len(mixtures)
        statistic = TORCH_DTYPES[types.statistic]
        even = mixture.balance_gradient(mixtures[0], balance, rows, statistic)
    for micro, (batch, (inputs, saves)) in enumerate(zip(batches, passed, strict=True)):
        first = micro == 0
        dx = model.inputs(capacity)
        total += head_loss(model, batch, inputs[-1], scale, chunk, dx, grads, first)
        for i in reversed(range(shape.layers)):
            dy, dx = dx, (model.inputs(capacity) if i % 2 else dx)
            layer_backward(model, i, batch, inputs[i], saves[i], dy, dx, grads, first, recompute[i], even)
        reaching.append(dx)
    for micro, batch in enumerate(batches):
        embed_backward(model, reaching[micro], batch, grads, micro == 0)
    return total * scale, grads


def plain_logits(model: PlainModel, batch: TokenBatch) -> Tensor:
    """[N, V] in the compute dtype."""
    inputs, _ = forward(model, batch, batch.tokens)
    weights = model.weights(model.head)
    if model.shape.vocabulary_parts > 1:
        parts = [model.weights(block.index)["weight"] for block in model.head_parts]
        weights = {**weights, "weight": torch.cat(parts)}
    normed, norm = model.inputs(batch.tokens), model.shape.norm
    saved = poisoned(norm.saved("norm", batch.tokens, model.types.statistic))
    norm_forward(model.decoder.kernels, norm, weights, "norm", inputs[-1], normed, saved)
    logits, cap = normed @ weights["weight"].t(), model.shape.variant.logit_cap
    return logits if cap is None else torch.tanh(logits / cap) * cap
