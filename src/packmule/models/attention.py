"""Causal attention within documents: forward and backward over given buffers.

Letters: N tokens, A attention heads, K key/value heads, G = A / K, D head dimension, n tokens of
one document, t rows of a query tile. A *unit* is one (document, key/value head) pair; units are
independent, so several go through one batched product. No product ever mixes two documents, so
a document's results do not depend on its neighbors' contents, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from packmule.shapes.attention import ATTENTION_TILE, FLASH_LENGTH, attention_units, flash_documents

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels
    from packmule.shapes.layer import LayerShape

Variant = Literal["tiled", "flash"]
Scratch = Mapping[str, Tensor]


class Run(NamedTuple):
    """Neighboring documents of equal length: first token, documents, tokens of each."""

    start: int
    documents: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.documents * self.length


def runs(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Group equal neighbors, so that they share batched products."""
    found: list[Run] = []
    start = 0
    for length in lengths:
        if found and found[-1].length == length:
            found[-1] = found[-1]._replace(documents=found[-1].documents + 1)
        else:
            found.append(Run(start, 1, length))
        start += length
    return tuple(found)


# Processor time of two threads, ms, forward + backward of one layer: 16 heads, D 64, a Zen 4
# without AMX, torch 2.13. "flash" is torch's CPU kernel.
#
#     documents      bfloat16         float32          float64
#                  tiled  flash     tiled  flash     tiled  flash
#     32 x   16      3.5   17.7       4.7    4.4      12.2    9.5
#      8 x   64      4.9   12.4       8.3    6.1      19.1   15.4
#      4 x  128      7.0   15.4       9.8   10.2      28.9   26.8
#      2 x  256      8.9   16.4      15.8   14.4      43.3   46.0
#      1 x  512     13.8   26.9      21.4   28.6      70.1   96.4
#      1 x 2048    191    233       252    267       942    901
def choose(dtype: torch.dtype, length: int) -> Variant:
    """The variant that is faster for documents of this length, by the table above; a pure
    rule, so that one run's bits cannot depend on a measurement."""
    return "flash" if dtype != torch.bfloat16 and length <= FLASH_LENGTH else "tiled"


def _parts(layer: LayerShape, dtype: torch.dtype, groups: Sequence[Run]) -> Iterator[tuple[Variant, Run]]:
    """Runs and their variants; flash runs are cut, since torch allocates that kernel's results."""
    for run in groups:
        plain = layer.cap is None and (layer.window is None or layer.window >= run.length)
        variant = choose(dtype, run.length) if plain else "tiled"
        step = flash_documents(layer, run.length) if variant == "flash" else run.documents
        for first in range(0, run.documents, step):
            documents = min(step, run.documents - first)
            yield variant, Run(run.start + first * run.length, documents, run.length)


@dataclass(frozen=True)
class _Unit:
    """Some documents and some key/value heads of a run."""

    documents: slice
    heads: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.documents.stop - self.documents.start, self.heads.stop - self.heads.start


def _units(documents: int, heads: int, most: int) -> Iterator[_Unit]:
    if most >= heads:
        step = most // heads
        for first in range(0, documents, step):
            yield _Unit(slice(first, min(first + step, documents)), slice(0, heads))
        return
    for document in range(documents):
        for first in range(0, heads, most):
            yield _Unit(slice(document, document + 1), slice(first, min(first + most, heads)))


def _take(scratch: Tensor, *shape: int) -> Tensor:
    """The first elements of a flat scratch tensor, in a shape."""
    count = 1
    for size in shape:
        count *= size
    return scratch[:count].view(shape)


def _statistics(lse: Tensor, done: int, batch: int, first: int, last: int) -> Tensor:
    """Where one tile's lse lies: units one after the other, each tile by tile."""
    start = done + batch * first
    return lse[start : start + batch * (last - first)].view(batch, last - first)


def attention_forward(
    kernels: Kernels,
    layer: LayerShape,
    groups: Sequence[Run],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scratch: Scratch,
) -> None:
    """softmax(q kᵀ * scale + causal, within the window) v for every document and head; with a cap
    the scores are first bounded smoothly (Gemma 2, arXiv:2408.00118).

    Args:
        groups: the documents, as `runs` gives them.
        q: [N, A*D], k and v: [N, K*D], after RoPE, in the compute dtype.
        out: [N, A*D], written.
        lse: [A*N] in the statistics dtype, written: log-sum-exp of every row. Document runs
            lie one after the other; the order inside a run belongs to the variant.
        scratch: the tensors of `shapes.attention.attention_scratch`.
    """
    for variant, run in _parts(layer, q.dtype, groups):
        rows = slice(run.start, run.stop)
        part = lse[layer.heads * run.start : layer.heads * run.stop]
        if variant == "flash":
            _flash_forward(layer, run, q[rows], k[rows], v[rows], out[rows], part)
        else:
            _tiled_forward(kernels, layer, run, q[rows], k[rows], v[rows], out[rows], part, scratch)


def attention_backward(
    kernels: Kernels,
    layer: LayerShape,
    groups: Sequence[Run],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scratch: Scratch,
) -> None:
    """Gradients of `attention_forward` (Dao et al. 2022, algorithm 4: D = rowsum(dO * O)).

    Args:
        out, lse: what the forward wrote; `lse` may be rewritten with the same bits.
        dout: [N, A*D], gradient of `out`.
        dq, dk, dv: written. They may be q, k and v themselves.
        scratch: the tensors of `shapes.attention.attention_scratch(..., backward=True)`.
    """
    for variant, run in _parts(layer, q.dtype, groups):
        rows = slice(run.start, run.stop)
        part = lse[layer.heads * run.start : layer.heads * run.stop]
        tensors = (q[rows], k[rows], v[rows], out[rows], part, dout[rows], dq[rows], dk[rows], dv[rows])
        if variant == "flash":
            _flash_backward(layer, run, *tensors)
        else:
            _tiled_backward(kernels, layer, run, *tensors, scratch)


def _tiled_forward(
    kernels: Kernels,
    layer: LayerShape,
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scratch: Scratch,
) -> None:
    n, kv_heads, group, d = run.length, layer.kv_heads, layer.heads // layer.kv_heads, layer.head_dim
    q5, out5 = (x.view(run.documents, n, kv_heads, group, d).permute(0, 2, 3, 1, 4) for x in (q, out))
    k4, v4 = (x.view(run.documents, n, kv_heads, d).transpose(1, 2) for x in (k, v))
    done = 0
    for unit in _units(run.documents, kv_heads, attention_units(layer, n)):
        here = (unit.documents, unit.heads)
        batch = unit.shape[0] * unit.shape[1]
        keys = _take(scratch["tile_k"], *unit.shape, n, d)
        values = _take(scratch["tile_v"], *unit.shape, n, d)
        keys.copy_(k4[here])
        values.copy_(v4[here])
        keys, values = keys.view(batch, n, d), values.view(batch, n, d)
        stats = lse[done : done + batch * group * n]
        attend_keys(kernels, layer, q5[here], keys, values, 0, out5[here], stats, scratch)
        done += batch * group * n


def attend_keys(
    kernels: Kernels,
    layer: LayerShape,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    offset: int,
    out: Tensor,
    lse: Tensor,
    scratch: Scratch,
) -> None:
    """Tiles of queries against their prefixes of keys, for some documents and key/value heads.

    Args:
        q, out: views [documents, K, G, n, D] of any strides; they may be the same.
        keys, values: [documents * K, offset + n, D].
        offset: keys before the first query's own.
        lse: [at least documents * K * G * n], written tile by tile.
        scratch: "tile_q" and "tile_scores" of `shapes.attention.attention_scratch`.
    """
    documents, kv_heads, group, n, d = q.shape
    batch = documents * kv_heads
    for first in range(0, n, ATTENTION_TILE):
        last = min(first + ATTENTION_TILE, n)
        rows, seen = last - first, slice(_first_key(layer, offset + first), offset + last)
        width = seen.stop - seen.start
        tile = _take(scratch["tile_q"], documents, kv_heads, group, rows, d)
        tile.copy_(q[:, :, :, first:last])
        flat = tile.view(batch, group * rows, d)
        scores = _take(scratch["tile_scores"], batch, group * rows, width)
        torch.bmm(flat, keys[:, seen].transpose(1, 2), out=scores)
        stats = _statistics(lse, 0, batch * group, first, last)
        if layer.cap is not None:
            kernels.softcap(scores, layer.scale, layer.cap)
        _softmax(kernels, layer, scores.view(batch * group, rows, width), offset + first - seen.start, stats)
        # The query tile has been used; its place takes the output.
        torch.bmm(scores, values[:, seen], out=flat)
        out[:, :, :, first:last].copy_(tile)


def _first_key(layer: LayerShape, query: int) -> int:
    """The first key that a query sees."""
    return 0 if layer.window is None else max(0, query - layer.window + 1)


def _softmax(kernels: Kernels, layer: LayerShape, scores: Tensor, offset: int, lse: Tensor) -> None:
    """Scores [B, t, m] to probabilities; capped ones are scaled already."""
    scale = layer.scale if layer.cap is None else 1.0
    kernels.causal_softmax(scores, offset, scale, lse, layer.window)


def _tiled_backward(
    kernels: Kernels,
    layer: LayerShape,
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scratch: Scratch,
) -> None:
    n, kv_heads, group, d = run.length, layer.kv_heads, layer.heads // layer.kv_heads, layer.head_dim
    q5, out5, dout5, dq5 = (
        x.view(run.documents, n, kv_heads, group, d).permute(0, 2, 3, 1, 4) for x in (q, out, dout, dq)
    )
    k4, v4, dk4, dv4 = (x.view(run.documents, n, kv_heads, d).transpose(1, 2) for x in (k, v, dk, dv))
    done = 0
    for unit in _units(run.documents, kv_heads, attention_units(layer, n)):
        here = (unit.documents, unit.heads)
        batch = unit.shape[0] * unit.shape[1]
        keys = _take(scratch["tile_k"], *unit.shape, n, d)
        values = _take(scratch["tile_v"], *unit.shape, n, d)
        keys.copy_(k4[here])
        values.copy_(v4[here])
        keys, values = keys.view(batch, n, d), values.view(batch, n, d)
        dkeys = _take(scratch["tile_dk"], batch, n, d)
        dvalues = _take(scratch["tile_dv"], batch, n, d)
        # From the last tile up: without a window its prefix is every key, so it writes and the others
        # add; with a window all add.
        windowed = _first_key(layer, n - 1) > 0
        if windowed:
            dkeys.zero_()
            dvalues.zero_()
        for first in reversed(range(0, n, ATTENTION_TILE)):
            last = min(first + ATTENTION_TILE, n)
            rows, count = last - first, group * (last - first)
            seen, opening = slice(_first_key(layer, first), last), last == n and not windowed
            width = seen.stop - seen.start
            tile = _take(scratch["tile_q"], *unit.shape, group, rows, d)
            dtile = _take(scratch["tile_dout"], *unit.shape, group, rows, d)
            tile.copy_(q5[here][:, :, :, first:last])
            dtile.copy_(dout5[here][:, :, :, first:last])
            flat, dflat = tile.view(batch, count, d), dtile.view(batch, count, d)
            product = _take(scratch["tile_product"], *unit.shape, group, rows, d)
            product.copy_(dtile)
            product.mul_(out5[here][:, :, :, first:last])
            delta = _take(scratch["tile_delta"], batch * group, rows)
            torch.sum(product.view(batch * group, rows, d), -1, out=delta)

            p = _take(scratch["tile_scores"], batch, count, width)
            torch.bmm(flat, keys[:, seen].transpose(1, 2), out=p)
            stats = _statistics(lse, done, batch * group, first, last)
            if layer.cap is not None:
                kernels.softcap(p, layer.scale, layer.cap)
                capped = _take(scratch["tile_capped"], batch, count, width)
                capped.copy_(p)
            _softmax(kernels, layer, p.view(batch * group, rows, width), first - seen.start, stats)
            _add_product(dvalues[:, seen], p, dflat, opening, scratch)
            ds = _take(scratch["tile_dscores"], batch, count, width)
            torch.bmm(dflat, values[:, seen].transpose(1, 2), out=ds)
            kernels.causal_softmax_backward(
                p.view(batch * group, rows, width),
                ds.view(batch * group, rows, width),
                delta,
                layer.scale if layer.cap is None else 1.0,
            )
            if layer.cap is not None:
                kernels.softcap_backward(ds, capped, layer.scale, layer.cap)
            _add_product(dkeys[:, seen], ds, flat, opening, scratch)
            torch.bmm(ds, keys[:, seen], out=flat)
            dq5[here][:, :, :, first:last].copy_(tile)
        done += batch * group * n
        dk4[here].copy_(dkeys.view(*unit.shape, n, d))
        dv4[here].copy_(dvalues.view(*unit.shape, n, d))


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool, scratch: Scratch) -> None:
    """total (+)= aᵀ b, summed in total's dtype: [B, m, D] += [B, t, m]ᵀ [B, t, D]."""
    batch, _, m = a.shape
    if total.dtype == a.dtype:
        if first:
            torch.bmm(a.transpose(1, 2), b, out=total)
        else:
            torch.baddbmm(total, a.transpose(1, 2), b, out=total)
        return
    product = _take(scratch["tile_dkv"], batch, m, b.shape[2])
    torch.bmm(a.transpose(1, 2), b, out=product)
    if first:
        total.copy_(product)
    else:
        total.add_(product)


def _flash_views(run: Run, layer: LayerShape, *tensors: Tensor) -> list[Tensor]:
    """[documents, heads, n, D] of [documents * n, heads * D], sharing memory."""
    return [x.view(run.documents, run.length, -1, layer.head_dim).transpose(1, 2) for x in tensors]


def _flash_forward(
    layer: LayerShape, run: Run, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    q4, k4, v4, out4 = _flash_views(run, layer, q, k, v, out)
    result, stats = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q4, k4, v4, 0.0, True, scale=layer.scale
    )
    out4.copy_(result)
    lse.view(run.documents, layer.heads, run.length).copy_(stats)


def _flash_backward(
    layer: LayerShape,
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    q4, k4, v4, out4, dout4, dq4, dk4, dv4 = _flash_views(run, layer, q, k, v, out, dout, dq, dk, dv)
    stats = lse.view(run.documents, layer.heads, run.length)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout4, q4, k4, v4, out4, stats, 0.0, True, scale=layer.scale
    )
    for target, grad in zip((dq4, dk4, dv4), grads, strict=True):
        target.copy_(grad)
