"""What each task body keeps and borrows: saved tensors, scratch, workspace, FLOPs.

Letters as in docs/design.md. `c` is the compute dtype; `s` that of statistics (float32, or
float64 in fp64 mode); `p` that of products. The bodies in packmule.models take their views from these
very lists, so declared bytes are used bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packmule.shapes.layout import ITEMSIZE, TensorSpec
from packmule.shapes.model import Block, ModelShape

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


def layer_saved(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What a layer's backward needs from its forward, besides the block input."""
    c, s, n = types.compute, types.statistic, tokens
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        TensorSpec("rstd1", (n,), s),
        TensorSpec("q", (n, q), c),
        TensorSpec("k", (n, kv), c),
        TensorSpec("v", (n, kv), c),
        TensorSpec("attention", (n, q), c),
        TensorSpec("lse", (shape.heads * n,), s),
        TensorSpec("middle", (n, shape.hidden), c),
        TensorSpec("rstd2", (n,), s),
        TensorSpec("gate", (n, shape.ffn), c),
        TensorSpec("up", (n, shape.ffn), c),
    )


ATTENTION_TILE = 128
"""Query rows of one attention tile; keys after a tile's last row are skipped."""

ATTENTION_ELEMENTS = 1 << 20
"""Elements that the scores of one batched attention product may have, unless one pair needs more."""


KERNEL_WORKSPACE = 10 << 20
"""Most bytes that matrix products pack outside the arena, in any body (measured: up to 7 MiB)."""

PRIMITIVES_KEPT = 32
"""Compiled matrix products that oneDNN keeps (bfloat16 only: float32 and float64 go to MKL). A
layer needs about twenty; fewer than that, and each layer compiles its own again."""

PRIMITIVE_BYTES = 850_000
"""Resident bytes of one (measured: 0.6 MB of heap whatever its shape, and gaps between them)."""

FLASH_LENGTH = 64
"""Longest document that torch's flash kernel takes (packmule.models.attention.choose)."""


def flash_documents(shape: ModelShape, length: int) -> int:
    """Documents that go through one call of the flash kernel."""
    return max(1, ATTENTION_ELEMENTS // (length * shape.heads * shape.head_dim))


def _pair_elements(shape: ModelShape, length: int) -> int:
    """Elements of the largest temporary of one (document, key/value head) pair."""
    group, d, tile = shape.heads // shape.kv_heads, shape.head_dim, min(ATTENTION_TILE, length)
    return max(group * tile * length, length * d, group * tile * d)


def attention_units(shape: ModelShape, length: int) -> int:
    """(Document, key/value head) pairs that go through one batched product."""
    return max(1, ATTENTION_ELEMENTS // _pair_elements(shape, length))


def attention_scratch(
    shape: ModelShape, queries: int, keys: int, types: Dtypes, backward: bool
) -> tuple[TensorSpec, ...]:
    """Temporaries of attention for at most `queries` rows, whatever their documents, each of
    which sees at most `keys` keys. Flat: each document length takes its own shapes from them."""
    p, s = types.product, types.statistic
    group, d, tile = shape.heads // shape.kv_heads, shape.head_dim, min(ATTENTION_TILE, queries)
    rows = min(shape.heads * queries * d, max(ATTENTION_ELEMENTS, group * tile * d))
    prefix = min(shape.kv_heads * keys * d, max(ATTENTION_ELEMENTS, keys * d))
    scores = min(shape.heads * tile * keys, max(ATTENTION_ELEMENTS, group * tile * keys))
    forward = (
        TensorSpec("tile_q", (rows,), p),
        TensorSpec("tile_k", (prefix,), p),
        TensorSpec("tile_v", (prefix,), p),
        TensorSpec("tile_scores", (scores,), p),
    )
    if not backward:
        return forward
    return (
        *forward,
        TensorSpec("tile_dout", (rows,), p),
        TensorSpec("tile_product", (rows,), s),
        TensorSpec("tile_delta", (rows // d,), s),
        TensorSpec("tile_dscores", (scores,), p),
        TensorSpec("tile_dk", (prefix,), s),
        TensorSpec("tile_dv", (prefix,), s),
        *((TensorSpec("tile_dkv", (prefix,), p),) if p != s else ()),
    )


def _matrices(block: Block) -> list[tuple[int, int]]:
    """(outputs, inputs) of a block's weights, as many outputs as are dealt with at once."""
    return [(min(p.shape[0], WEIGHT_ROWS), p.shape[1]) for p in block.parameters if len(p.shape) == 2]


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


def layer_forward_scratch(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer's forward (saved tensors come on top when they are not kept)."""
    c = types.compute
    return (
        TensorSpec("normed", (tokens, shape.hidden), c),
        TensorSpec("act", (tokens * shape.ffn,), c),
        *_wide(_matrices(shape.blocks()[1]), tokens, types),
        *attention_scratch(shape, tokens, tokens, types, backward=False),
    )


def layer_backward_scratch(shape: ModelShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of a layer's backward, and of the forward it may run first."""
    c = types.compute
    matrices = _matrices(shape.blocks()[1])
    return (
        TensorSpec("normed", (tokens, shape.hidden), c),
        TensorSpec("act", (tokens * max(shape.ffn, shape.heads * shape.head_dim),), c),
        *_wide(matrices, tokens, types),
        *attention_scratch(shape, tokens, tokens, types, backward=True),
        *_weight_gradient(matrices, types),
    )


def head_scratch(shape: ModelShape, chunk: int, types: Dtypes, train: bool) -> tuple[TensorSpec, ...]:
    """Temporaries of the head for one loss chunk of `chunk` tokens."""
    c, s = types.compute, types.statistic
    matrices = [(min(shape.vocab, WEIGHT_ROWS), shape.hidden)]
    forward = (
        TensorSpec("normed", (chunk, shape.hidden), c),
        TensorSpec("rstd", (chunk,), s),
        TensorSpec("logits", (chunk, shape.vocab), c),
        TensorSpec("loss", (chunk,), s),
        *_wide(matrices, chunk, types),
    )
    if not train:
        return forward
    return (
        *forward,
        TensorSpec("dnormed", (chunk, shape.hidden), c),
        *_weight_gradient(matrices, types),
    )


def decode_scratch(shape: ModelShape, tokens: int, positions: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Temporaries of generation: at most `tokens` at once over a cache of `positions`."""
    c, s, n = types.compute, types.statistic, tokens
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = attention_scratch(shape, tokens, positions, types, backward=False)
    return (
        TensorSpec("normed", (n, shape.hidden), c),
        TensorSpec("rstd", (n,), s),
        TensorSpec("q", (n, q), c),
        TensorSpec("k", (n, kv), c),
        TensorSpec("v", (n, kv), c),
        TensorSpec("middle", (n, shape.hidden), c),
        TensorSpec("gate", (n, shape.ffn), c),
        TensorSpec("up", (n, shape.ffn), c),
        TensorSpec("lse", (shape.heads * n,), s),
        TensorSpec("logits", (1, shape.vocab), c),
        *(spec for spec in attention if spec.name in ("tile_q", "tile_scores")),
    )


def cache_spec(shape: ModelShape, positions: int, types: Dtypes) -> TensorSpec:
    """One layer's keys and values."""
    return TensorSpec("cache", (2, shape.kv_heads, positions, shape.head_dim), types.compute)


def input_spec(shape: ModelShape, tokens: int, types: Dtypes) -> TensorSpec:
    """The residual stream between blocks."""
    return TensorSpec("x", (tokens, shape.hidden), types.compute)


def layer_workspace(shape: ModelShape, tokens: int, types: Dtypes) -> int:
    """Most bytes torch holds outside the arena during a layer's body, whatever the documents:
    the flash kernel's results for short ones where it is used (not in bfloat16), and what
    matrix products pack."""
    if types.compute == "bfloat16":
        return KERNEL_WORKSPACE
    most = flash_documents(shape, FLASH_LENGTH) * FLASH_LENGTH
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    per_token = (q + 2 * kv) * ITEMSIZE[types.compute] + 2 * shape.heads * ITEMSIZE[types.statistic]
    return min(tokens, most) * per_token + KERNEL_WORKSPACE


def compiled_bytes(types: Dtypes) -> int:
    """Bytes of the compiled matrix products that a process comes to hold."""
    return PRIMITIVES_KEPT * PRIMITIVE_BYTES if types.product == "bfloat16" else 0


def layer_flops(shape: ModelShape, tokens: int, mean_length: float) -> tuple[float, float]:
    """(matmul, attention) FLOPs of one layer's forward; backward takes twice the first and
    2.5 times the second. `mean_length` is tokens per document, weighted by tokens."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * q + 2 * kv) + 3 * shape.hidden * shape.ffn
    return 2.0 * tokens * weights, 2.0 * tokens * mean_length * q


def head_flops(shape: ModelShape, tokens: int) -> float:
    """FLOPs of the logits; their backward takes twice as many."""
    return 2.0 * tokens * shape.vocab * shape.hidden
