"""Attention's variants against a softmax written out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.parity.plain import TYPES
from torch import Tensor

from packmule.kernels import load
from packmule.models import attention
from packmule.models.attention import Run
from packmule.models.views import views
from packmule.shapes import attention as sizes
from packmule.shapes import bodies
from packmule.shapes.layer import LayerShape
from packmule.shapes.layout import layout
from packmule.shapes.model import ModelShape

PRECISIONS = {"fp32": 2e-5, "fp64": 1e-12, "bf16-mixed": 3e-2, "bf16-wide": 3e-2}


def layer_of(heads: int, kv_heads: int, head_dim: int, **changes: Any) -> LayerShape:
    layer = ModelShape(11, 8, 1, heads, kv_heads, head_dim, 8, 1e-5, 1e4, False, 4096).layer(1)
    return replace(layer, **changes)


def written_out(layer: LayerShape, lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 [N, A*D], one document after the other, with autograd."""
    group, d, outs = layer.heads // layer.kv_heads, layer.head_dim, []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        n = len(a)
        heads = a.view(n, layer.heads, d).transpose(0, 1)
        keys, values = (
            x.view(n, layer.kv_heads, d).transpose(0, 1).repeat_interleave(group, 0) for x in (b, c)
        )
        scores = heads @ keys.transpose(1, 2) * layer.scale
        if layer.cap is not None:
            scores = torch.tanh(scores / layer.cap) * layer.cap
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        if layer.window is not None:
            hidden |= torch.ones(n, n, dtype=torch.bool).tril(-layer.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1).reshape(n, -1))
    return torch.cat(outs)


@pytest.mark.parametrize("variant", ("tiled", "flash"))
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lengths", "changes"),
    (
        (4, 2, 8, (1, 5, 5, 5, 64, 130), {}),
        (3, 3, 10, (257, 3, 128, 129, 129), {"scale": 0.5}),
        (12, 4, 16, (900,), {}),
        (2, 1, 64, (40,) * 30, {}),
        (4, 2, 8, (1, 5, 64, 64, 130, 300, 130), {"window": 37, "cap": 2.0}),
        (3, 3, 10, (257, 129, 129), {"window": 128}),
        (2, 1, 16, (500, 20), {"window": 1}),
        (12, 4, 16, (900,), {"window": 200, "scale": 0.1}),
        (2, 2, 7, (300, 40), {"cap": 0.7, "scale": 0.9}),
    ),
)
def test_both_variants_equal_the_written_out_softmax(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    precision: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    lengths: tuple[int, ...],
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(attention, "choose", lambda dtype, length: variant)
    # Small products, so that heads and documents are cut too.
    monkeypatch.setattr(sizes, "ATTENTION_ELEMENTS", 1 << 16)
    layer, types = layer_of(heads, kv_heads, head_dim, **changes), TYPES[precision]
    limit = PRECISIONS[precision]
    tokens = sum(lengths)
    place = layout(bodies.layer_saved(layer, tokens, types))
    saved = views(torch.full((place.bytes,), 0xFF, dtype=torch.uint8), place)
    place = layout(sizes.attention_scratch(layer, tokens, tokens, types, backward=True))
    scratch = views(torch.full((place.bytes,), 0xFF, dtype=torch.uint8), place)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(saved[name].shape, generator=generator).to(saved[name].dtype) for name in "qkv"]
    wide = [x.double().clone().requires_grad_() for x in inputs]
    expected = written_out(layer, lengths, *wide)
    dout = torch.randn(expected.shape, generator=generator).to(inputs[0].dtype)
    expected.backward(dout.double())

    q, k, v, out, lse = (saved[name] for name in ("q", "k", "v", "attention", "lse"))
    for target, value in zip((q, k, v), inputs, strict=True):
        target.copy_(value)
    groups, kernels = attention.runs(lengths), load(2, "torch")
    attention.attention_forward(kernels, layer, groups, q, k, v, out, lse, scratch)
    before = lse.clone()
    assert bool(torch.isfinite(lse).all())
    # The gradients take the place of q, k and v.
    attention.attention_backward(kernels, layer, groups, q, k, v, out, lse, dout, q, k, v, scratch)
    assert torch.equal(lse, before)
    # The gradients of q and k are sums of p (dP - delta), which cancel where a row sees few keys: then what
    # is left is the rounding of dP, a product of dout and v, times k or q.
    rows_dp = dout.double().norm(dim=-1).max() * wide[2].detach().norm(dim=-1).max()
    rounded = torch.finfo(inputs[0].dtype).eps / 2 * layer.scale * float(rows_dp)
    cancelled = (0.0, *(rounded * float(x.detach().abs().max()) for x in (wide[1], wide[0])), 0.0)
    gradients = (x.grad for x in wide)
    for ours, theirs, rest in zip((out, q, k, v), (expected.detach(), *gradients), cancelled, strict=True):
        assert theirs is not None
        scale = max(1.0, float(theirs.abs().max()))
        assert float((ours.double() - theirs).abs().max()) < limit * scale + rest


def test_runs_join_equal_neighbors_only() -> None:
    assert attention.runs((4, 4, 2, 4)) == (Run(0, 2, 4), Run(8, 1, 2), Run(10, 1, 4))
    assert [run.stop for run in attention.runs((4, 4, 2, 4))] == [8, 10, 14]
    assert attention.runs(()) == ()


def test_scratch_covers_every_split_of_the_tokens(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        kv_heads = rng.choice((1, 2, 3, 8))
        window = rng.choice((None, rng.randint(1, 3000)))
        heads, head_dim = kv_heads * rng.choice((1, 3, 4)), rng.choice((8, 64, 128))
        layer = layer_of(heads, kv_heads, head_dim, window=window)
        tokens = rng.choice((rng.randint(1, 300), rng.randint(1, 20000)))
        specs = sizes.attention_scratch(layer, tokens, tokens, bodies.DTYPES["fp32"], backward=True)
        room = {spec.name: spec.numel for spec in specs}
        length = rng.randint(1, tokens)
        documents, group, d = tokens // length, layer.heads // kv_heads, layer.head_dim
        units = min(documents * kv_heads, sizes.attention_units(layer, length))
        tile = min(sizes.ATTENTION_TILE, length)
        assert units * group * tile * d <= room["tile_q"]
        assert units * group * tile <= room["tile_delta"]
        assert units * length * d <= room["tile_k"]
        seen = length if window is None else min(length, window + tile - 1)
        assert units * group * tile * seen <= room["tile_scores"]


def test_scratch_does_not_grow_with_the_square_of_the_length() -> None:
    layer, types = layer_of(16, 16, 64), bodies.DTYPES["bf16-mixed"]
    totals = [
        sum(spec.bytes for spec in sizes.attention_scratch(layer, n, n, types, True))
        for n in (16384, 32768, 65536)
    ]
    assert totals[2] - totals[1] <= 2.01 * (totals[1] - totals[0])
    assert totals[2] < 65536 * 65536 / 16
