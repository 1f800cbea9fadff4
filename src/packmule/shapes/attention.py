"""Attention as numbers: tiles, what goes through one batched product, temporaries.

Letters as in docs/design.md; `p` and `s` as in packmule.shapes.bodies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packmule.shapes.layer import LayerShape
from packmule.shapes.layout import TensorSpec

if TYPE_CHECKING:
    from packmule.shapes.bodies import Dtypes

ATTENTION_TILE = 128
"""Query rows of one attention tile; keys that none of them sees are skipped."""

ATTENTION_ELEMENTS = 1 << 20
"""Elements that the scores of one batched attention product may have, unless one pair needs more."""

FLASH_LENGTH = 64
"""Longest document that torch's flash kernel takes (packmule.models.attention.choose)."""


def flash_documents(layer: LayerShape, length: int) -> int:
    """Documents that go through one call of the flash kernel."""
    return max(1, ATTENTION_ELEMENTS // (length * layer.heads * layer.head_dim))


def _tile_keys(layer: LayerShape, tile: int, length: int) -> int:
    """Most keys that the queries of one tile see."""
    return length if layer.window is None else min(length, layer.window + tile - 1)


def _pair_elements(layer: LayerShape, length: int) -> int:
    """Elements of the largest temporary of one (document, key/value head) pair."""
    group, d, tile = layer.heads // layer.kv_heads, layer.head_dim, min(ATTENTION_TILE, length)
    return max(group * tile * _tile_keys(layer, tile, length), length * d, group * tile * d)


def attention_units(layer: LayerShape, length: int) -> int:
    """(Document, key/value head) pairs that go through one batched product."""
    return max(1, ATTENTION_ELEMENTS // _pair_elements(layer, length))


def attention_scratch(
    layer: LayerShape, queries: int, keys: int, types: Dtypes, backward: bool
) -> tuple[TensorSpec, ...]:
    """Temporaries of attention for at most `queries` rows, whatever their documents, each of
    which sees at most `keys` keys. Flat: each document length takes its own shapes from them."""
    p, s = types.product, types.statistic
    group, d, tile = layer.heads // layer.kv_heads, layer.head_dim, min(ATTENTION_TILE, queries)
    rows = min(layer.heads * queries * d, max(ATTENTION_ELEMENTS, group * tile * d))
    prefix = min(layer.kv_heads * keys * d, max(ATTENTION_ELEMENTS, keys * d))
    seen = _tile_keys(layer, tile, keys)
    scores = min(layer.heads * tile * keys, max(ATTENTION_ELEMENTS, group * tile * seen))
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
        *((TensorSpec("tile_capped", (scores,), p),) if layer.cap is not None else ()),
        TensorSpec("tile_dk", (prefix,), s),
        TensorSpec("tile_dv", (prefix,), s),
        *((TensorSpec("tile_dkv", (prefix,), p),) if p != s else ()),
    )


def attention_saved(layer: LayerShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What the attention half's backward needs from its forward, besides its input."""
    c, s, q, kv = types.compute, types.statistic, layer.query_width, layer.key_width
    return (
        *layer.norm.saved("norm1", tokens, s),
        TensorSpec("q", (tokens, q), c),
        TensorSpec("k", (tokens, kv), c),
        TensorSpec("v", (tokens, kv), c),
        TensorSpec("attention", (tokens, q), c),
        TensorSpec("lse", (layer.heads * tokens,), s),
        *(_raw(layer, tokens, types) if layer.qk_norm else ()),
        *(after_saved(layer, "post1", "mixed", tokens, types) if layer.post_norms else ()),
    )


def _raw(layer: LayerShape, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Queries and keys before their norms."""
    return (
        TensorSpec("q_raw", (tokens, layer.query_width), types.compute),
        *layer.norm.saved("q_norm", tokens * layer.heads, types.statistic),
        TensorSpec("k_raw", (tokens, layer.key_width), types.compute),
        *layer.norm.saved("k_norm", tokens * layer.kv_heads, types.statistic),
    )


def after_saved(
    layer: LayerShape, norm: str, name: str, tokens: int, types: Dtypes
) -> tuple[TensorSpec, ...]:
    """A half's output before the norm that follows it."""
    output = TensorSpec(name, (tokens, layer.hidden), types.compute)
    return (output, *layer.norm.saved(norm, tokens, types.statistic))
