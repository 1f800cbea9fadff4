"""What each task body keeps and borrows: saved tensors, scratch, workspace, FLOPs.

Letters as in docs/design.md. `c` is the compute dtype; `s` that of statistics (float32, or
float64 in fp64 mode); `p` that of products. The bodies in packmule.models take their views from these
very lists, so declared bytes are used bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from packmule.shapes.attention import (
    FLASH_LENGTH,
    after_saved,
    attention_saved,
    attention_scratch,
    flash_documents,
)
from packmule.shapes.blocks import Parameter
from packmule.shapes.experts import Experts
from packmule.shapes.layer import LayerShape
from packmule.shapes.layout import ITEMSIZE, TensorSpec
from packmule.shapes.model import ModelShape

if TYPE_CHECKING:
    from packmule.spec.plan import Numerics


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one precision: masters and moments, gradients, compute, statistics, and
    operands of matrix products (compute's, or the statistics' wider one)."""

    master: str
    gradient: str
    compute: str
    statistic: str
    product: str

    @property
    def widens(self) -> bool:
        """Operands of products are widened first."""
        return self.product != self.compute


DTYPES = {
    "fp32": Dtypes("float32", "float32", "float32", "float32", "float32"),
    "bf16-mixed": Dtypes("float32", "float32", "bfloat16", "float32", "bfloat16"),
    "fp64": Dtypes("float64", "float64", "float64", "float64", "float64"),
}


def dtypes(numerics: Numerics) -> Dtypes:
    """What a run computes in."""
    types = DTYPES[numerics.precision]
    return replace(types, product=numerics.products or types.product)


WEIGHT_ROWS = 8192
"""Rows of a weight that are widened, or whose gradient is computed, at once: no temporary of the
size of a vocabulary."""

PRODUCT_ROWS = 512
"""Tokens that are widened at once: 2 to 12 MB stay in cache (measured: as fast as all at once)."""


def layer_saved(layer: LayerShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What a layer's backward needs from its forward, besides the block input."""
    return (
        *attention_saved(layer, tokens, types),
        TensorSpec("middle", (tokens, layer.hidden), types.compute),
        *layer.norm.saved("norm2", tokens, types.statistic),
        *layer.feed_forward.saved(layer.hidden, tokens, types),
        *(after_saved(layer, "post2", "fed", tokens, types) if layer.post_norms else ()),
    )


KERNEL_WORKSPACE = 10 << 20
"""What matrix products allocate and free again outside the arena, in any body (measured: up to 7 MiB).
What MKL keeps from then on is `packed_bytes`."""

PACKED_BYTES = 34 << 20
"""Most bytes that MKL keeps for packing (measured: 34 MB with two threads and AVX-512, 1 MB with one)."""

PACKED_ROWS = 128
"""From so many tokens on, MKL's threads share a product's outputs (measured)."""

PRIMITIVES_KEPT = 32
"""Compiled matrix products that oneDNN keeps (bfloat16 only: float32 and float64 go to MKL). A
layer needs about twenty; fewer than that, and each layer compiles its own again."""

PRIMITIVE_BYTES = 850_000
"""Resident bytes of one (measured: 0.6 MB of heap whatever its shape, and gaps between them)."""

PRIMITIVE_CODE_BYTES = 3_200_000
"""Bytes that one maps for its code, of which it touches few (measured over random shapes: 100 MB of 32, 16 of
them resident)."""


def _matrices(parameters: Iterable[Parameter]) -> list[tuple[int, int]]:
    """(outputs, inputs) of weights, as many outputs as are dealt with at once."""
    return [(min(p.shape[0], WEIGHT_ROWS), p.shape[1]) for p in parameters if len(p.shape) == 2]


def _wide(matrices: list[tuple[int, int]], tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Where operands of products with these weights are widened."""
    if not types.widens:
        return ()
    rows, p = min(tokens, PRODUCT_ROWS), types.product
    return (
        TensorSpec("wide_weight", (max(o * i for o, i in matrices),), p),
        TensorSpec("wide_x", (rows * max(i for _, i in matrices),), p),
        TensorSpec("wide_y", (rows * max(o for o, _ in matrices),), p),
    )


def _weight_gradient(matrices: list[tuple[int, int]], types: Dtypes) -> tuple[TensorSpec, ...]:
    """Room for a product that is narrower than the gradient it is added to."""
    if types.product == types.gradient:
        return ()
    return (TensorSpec("wgrad", (max(o * i for o, i in matrices),), types.product),)


def _joined(*lists: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """All tensors; one that several lists name is flat, as large as the largest."""
    found: dict[str, TensorSpec] = {}
    for spec in chain.from_iterable(lists):
        other = found.setdefault(spec.name, spec)
        if spec.shape != other.shape:
            found[spec.name] = other._replace(shape=(max(spec.numel, other.numel),))
    return tuple(found.values())


def layer_forward_scratch(layer: LayerShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer's forward (saved tensors come on top when they are not kept)."""
    return _joined(
        (TensorSpec("normed", (tokens, layer.hidden), types.compute),),
        layer.feed_forward.scratch(layer.hidden, tokens, types, backward=False),
        _wide(_matrices(layer.parameters()), tokens, types),
        attention_scratch(layer, tokens, tokens, types, backward=False),
    )


def layer_backward_scratch(layer: LayerShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer's backward, and of the forward it may run first."""
    matrices = _matrices(layer.parameters())
    return _joined(
        (TensorSpec("normed", (tokens, layer.hidden), types.compute),),
        layer.feed_forward.scratch(layer.hidden, tokens, types, backward=True),
        (TensorSpec("act", (tokens * layer.query_width,), types.compute),),
        _wide(matrices, tokens, types),
        attention_scratch(layer, tokens, tokens, types, backward=True),
        _weight_gradient(matrices, types),
    )


def experts_scratch(
    experts: Experts, hidden: int, tokens: int, types: Dtypes, backward: bool, kept: bool
) -> tuple[TensorSpec, ...]:
    """Temporaries of one expert at a time, which may get every token.

    Args:
        kept: `experts_saved` holds gate and up.
    """
    c, f = types.compute, experts.width
    matrices = _matrices(experts.group_parameters(hidden, 1.0, range(1)))
    gated = (TensorSpec("gate", (tokens, f), c), TensorSpec("up", (tokens, f), c))
    forward = (
        TensorSpec("rows", (tokens, hidden), c),
        TensorSpec("act", (tokens, f), c),
        *(() if kept else gated),
        *_wide(matrices, tokens, types),
    )
    if not backward:
        return forward
    return (
        *forward,
        TensorSpec("drows", (tokens, hidden), c),
        TensorSpec("dact", (tokens, f), c),
        *_weight_gradient(matrices, types),
    )


def head_scratch(shape: ModelShape, chunk: int, types: Dtypes, train: bool) -> tuple[TensorSpec, ...]:
    """Temporaries of the head for one loss chunk of `chunk` tokens."""
    c, s = types.compute, types.statistic
    matrices = [(min(shape.vocab, WEIGHT_ROWS), shape.hidden)]
    forward = (
        TensorSpec("normed", (chunk, shape.hidden), c),
        *shape.norm.saved("norm", chunk, s),
        TensorSpec("logits", (chunk, shape.vocab), c),
        TensorSpec("loss", (chunk,), s),
        *_wide(matrices, chunk, types),
    )
    if not train:
        return forward
    return (
        *forward,
        TensorSpec("dnormed", (chunk, shape.hidden), c),
        *((TensorSpec("capped", (chunk, shape.vocab), c),) if shape.variant.logit_cap else ()),
        *_weight_gradient(matrices, types),
    )


SLAB_ELEMENTS = 1 << 18
"""Logits of a part of the vocabulary that become gradients at once: 1 MB stays in cache."""


def part_scratch(
    shape: ModelShape, rows: int, chunk: int, types: Dtypes, gradient: bool
) -> tuple[TensorSpec, ...]:
    """Temporaries of the head for one loss chunk and `rows` rows of the vocabulary.

    Args:
        gradient: of its second visit, which takes gradients.
    """
    c, s = types.compute, types.statistic
    matrices = [(min(rows, WEIGHT_ROWS), shape.hidden)]
    forward = (
        TensorSpec("normed", (chunk, shape.hidden), c),
        *shape.norm.saved("norm", chunk, s),
        TensorSpec("logits", (chunk, rows), c),
        TensorSpec("loss", (chunk,), s),
        *_wide(matrices, chunk, types),
    )
    if not gradient:
        return forward
    slab = min(chunk, max(1, SLAB_ELEMENTS // rows))
    return (
        *forward,
        TensorSpec("dnormed", (chunk, shape.hidden), c),
        TensorSpec("slab", (slab * rows,), s),
        *((TensorSpec("capped", (chunk, rows), c),) if shape.variant.logit_cap else ()),
        *_weight_gradient(matrices, types),
    )


def close_scratch(shape: ModelShape, chunk: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of the final norm's backward for one loss chunk, where the vocabulary is cut."""
    c = types.compute
    return (
        TensorSpec("normed", (chunk, shape.hidden), c),
        *shape.norm.saved("norm", chunk, types.statistic),
        TensorSpec("dnormed", (chunk, shape.hidden), c),
    )


def embed_part_scratch(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Rows on their way from or to a part of the embedding."""
    return (TensorSpec("rows", (min(tokens, PRODUCT_ROWS), shape.hidden), types.compute),)


def decode_scratch(layer: LayerShape, tokens: int, positions: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer when generating: at most `tokens` at once over a cache of `positions`.
    Nothing is widened: with so few tokens that costs more than it saves."""
    types = replace(types, product=types.compute)
    attention = attention_scratch(layer, tokens, positions, types, backward=False)
    return _joined(
        layer_saved(layer, tokens, types),
        (TensorSpec("normed", (tokens, layer.hidden), types.compute),),
        layer.feed_forward.scratch(layer.hidden, tokens, types, backward=False),
        tuple(spec for spec in attention if spec.name in ("tile_q", "tile_scores")),
    )


def head_decode_scratch(shape: ModelShape, rows: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of one token's logits of `rows` rows of the vocabulary."""
    return (
        TensorSpec("normed", (1, shape.hidden), types.compute),
        *shape.norm.saved("norm", 1, types.statistic),
        TensorSpec("logits", (1, rows), types.compute),
    )


def cache_spec(layer: LayerShape, positions: int, types: Dtypes) -> TensorSpec:
    """One layer's keys and values."""
    return TensorSpec("cache", (2, layer.kv_heads, positions, layer.head_dim), types.compute)


def input_spec(shape: ModelShape, tokens: int, types: Dtypes) -> TensorSpec:
    """The residual stream between blocks."""
    return TensorSpec("x", (tokens, shape.hidden), types.compute)


def layer_workspace(layer: LayerShape, tokens: int, types: Dtypes) -> int:
    """Most bytes torch holds outside the arena during a layer's body, whatever the documents:
    the flash kernel's results for short ones where it is used (not in bfloat16), and what
    matrix products pack."""
    if types.compute == "bfloat16":
        return KERNEL_WORKSPACE
    most = flash_documents(layer, FLASH_LENGTH) * FLASH_LENGTH
    per_token = (layer.query_width + 2 * layer.key_width) * ITEMSIZE[types.compute]
    per_token += 2 * layer.heads * ITEMSIZE[types.statistic]
    return min(tokens, most) * per_token + KERNEL_WORKSPACE


def rope_bytes(shape: ModelShape, positions: int, types: Dtypes) -> int:
    """Bytes of the rotary tables, which a process keeps outside the arena."""
    item = ITEMSIZE[types.statistic]
    ropes = {layer.rope for layer, _ in shape.layer_groups if layer.rope is not None}
    return sum(rope.rows(positions) * rope.dims * item for rope in ropes)


def compiled_bytes(types: Dtypes) -> int:
    """Bytes of the compiled matrix products that a process comes to hold."""
    return PRIMITIVES_KEPT * PRIMITIVE_BYTES if types.product == "bfloat16" else 0


def code_bytes(types: Dtypes) -> int:
    """Bytes of address space that their code takes."""
    return PRIMITIVES_KEPT * PRIMITIVE_CODE_BYTES if types.product == "bfloat16" else 0


def packed_bytes(shape: ModelShape, numerics: Numerics) -> int:
    """Bytes that MKL comes to hold for products in float32 and float64.

    Several threads pack what they share, up to PACKED_BYTES; of fewer than PACKED_ROWS tokens they share
    the inner dimension instead, and each further one has outputs of its own.
    """
    types = dtypes(numerics)
    if types.product == "bfloat16" or numerics.threads == 1:
        return 0
    item, most = ITEMSIZE[types.product], max(numerics.micro_tokens)
    found = 0
    for block in shape.cut(numerics.vocabulary_parts).blocks():
        if block.kind == "embed" and not shape.tied:
            continue  # rows are looked up
        tokens = min(most, numerics.loss_chunk) if block.kind in ("embed", "logits", "head") else most
        for parameter in block.parameters:
            if len(parameter.shape) != 2:
                continue
            outputs, inputs = parameter.shape
            outputs = min(outputs, WEIGHT_ROWS) if types.widens else outputs
            rows = tokens if tokens < PACKED_ROWS else 0
            found = max(found, item * outputs * rows, min(item * outputs * inputs, PACKED_BYTES))
    return found


def layer_flops(layer: LayerShape, tokens: int, mean_length: float) -> tuple[float, float]:
    """(matmul, attention) FLOPs of one layer's forward; backward takes twice the first and
    2.5 times the second. `mean_length` is tokens per document, weighted by tokens."""
    projections = layer.hidden * (2 * layer.query_width + 2 * layer.key_width)
    matmul = 2.0 * tokens * projections + layer.feed_forward.flops(layer.hidden, tokens)
    seen = mean_length / 2
    if layer.window is not None and layer.window < mean_length:
        # The first `window` queries of a document see fewer keys, the others exactly so many.
        seen = layer.window - layer.window**2 / (2 * mean_length)
    return matmul, 4.0 * tokens * seen * layer.query_width


def layer_moved(layer: LayerShape, tokens: int, types: Dtypes) -> int:
    """Bytes of activations that a layer's forward reads and writes, besides its products."""
    return (10 * layer.hidden * tokens + layer.feed_forward.moved(tokens)) * ITEMSIZE[types.compute]


def experts_moved(layer: LayerShape, tokens: int, types: Dtypes, experts: int) -> float:
    """The same of a forward through some of its experts."""
    if layer.experts is None:
        return 0.0
    return layer.experts.group_moved(layer.hidden, tokens, experts) * ITEMSIZE[types.compute]


def experts_flops(layer: LayerShape, tokens: int, experts: int) -> float:
    """FLOPs of a forward through some of a layer's experts: those that tokens are routed to."""
    return layer.experts.group_flops(layer.hidden, tokens, experts) if layer.experts else 0.0


def head_flops(shape: ModelShape, tokens: int, rows: int | None = None) -> float:
    """FLOPs of the logits, or of those of `rows` rows; their backward takes twice as many."""
    return 2.0 * tokens * (rows or shape.vocab) * shape.hidden
