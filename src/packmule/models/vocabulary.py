"""Embedding and head of a vocabulary cut into parts, as explicit forward and backward task bodies.

The head's log-sum-exp is added up over the parts while they pass by, as online softmax does (Milakov
and Gimelshein 2018, arXiv:1805.02867); the second visit computes a part's logits again, with the same
bits, and needs no other part's. Letters as in packmule.models.decoder, and r rows of a part. `ids` are
those whose rows a part holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.context import Decoder, Tensors, TokenBatch
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import linear, sum_input_gradients, weight_gradient
from packmule.spec.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator


def embed_forward(
    decoder: Decoder, weights: Tensors, ids: range, batch: TokenBatch, out: Tensor, scratch: Tensors
) -> None:
    """`decoder.embed_forward` for the tokens of one part. Parts come in order: the last one adds learned
    positions to all tokens.

    Args:
        out: c [M, H], of which these tokens' rows are written.
        scratch: embed_part_scratch.
    """
    kernels = decoder.kernels
    for places, rows, some in _tokens(batch.ids, ids, scratch["rows"]):
        kernels.embedding(weights["weight"], rows, some, decoder.embedding_scale)
        out.index_copy_(0, places, some)
    if "positions.weight" in weights:
        kernels.embedding(weights["positions.weight"], batch.positions.long(), out[: batch.tokens], add=True)


def embed_backward(
    decoder: Decoder,
    dy: Tensor,
    ids: range,
    batch: TokenBatch,
    grads: Tensors,
    scratch: Tensors,
    first: bool,
) -> None:
    """`decoder.embed_backward` for the tokens of one part. dy: c [M, H]."""
    kernels, dy = decoder.kernels, dy[: batch.tokens]
    if first and not decoder.shape.tied:
        grads["weight"].zero_()
    for places, rows, some in _tokens(batch.ids, ids, scratch["rows"]):
        kernels.embedding(dy, places, some)
        kernels.embedding_backward(some, rows, grads["weight"], False, decoder.embedding_scale)
    if "positions.weight" in grads:
        kernels.embedding_backward(dy, batch.positions.long(), grads["positions.weight"], first)


def _tokens(found: Tensor, ids: range, room: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(places, rows of the part, room for as many rows) of the tokens of a part, some at a time."""
    places = ((found >= ids.start) & (found < ids.stop)).nonzero()[:, 0]
    for some in places.split(len(room)) if len(places) else ():
        yield some, found[some] - ids.start, room[: len(some)]


def part_score(
    decoder: Decoder,
    weights: Tensors,
    ids: range,
    batch: TokenBatch,
    x: Tensor,
    chunk: int,
    scores: Tensors,
    scratch: Tensors,
    opening: bool,
) -> None:
    """The head's first visit to a part: its logits go into every token's log-sum-exp.

    Args:
        weights: those of the final norm, and "weight" c [r, H].
        x: c [M, H].
        scores: shapes.vocabulary.scores; written where `opening`, else added to.
        scratch: part_scratch(gradient=False).
    """
    kernels = decoder.kernels
    for start in range(0, batch.tokens, chunk):
        rows = slice(start, min(start + chunk, batch.tokens))
        _, logits = _logits(decoder, weights, x[rows], scratch)
        highest, where = logits.max(1)
        # Cross entropy with the highest logit as its target is the log-sum-exp above that logit.
        above = scratch["loss"][: len(logits)]
        kernels.cross_entropy(logits, where, 1.0, above, False)
        highest = highest.to(above.dtype)
        lse, best, best_id = (scores[name][rows] for name in ("lse", "best", "best_id"))
        above.add_(highest)
        if opening:
            lse.copy_(above)
            best.copy_(highest)
            best_id.copy_(where)
            scores["target"][rows].zero_()
        else:
            torch.logaddexp(lse, above, out=lse)
            better = highest > best
            best.copy_(torch.where(better, highest, best))
            best_id.copy_(torch.where(better, where + ids.start, best_id))
        tokens, targets = _targets(batch.targets[rows], ids)
        scores["target"][rows][tokens] = logits[tokens, targets].to(lse.dtype)


def part_gradient(
    decoder: Decoder,
    weights: Tensors,
    ids: range,
    batch: TokenBatch,
    x: Tensor,
    scale: float,
    chunk: int,
    scores: Tensors,
    dnormed: Tensor,
    grad: Tensor,
    scratch: Tensors,
    first: bool,
    opening: bool,
) -> None:
    """The head's second visit to a part: gradients of its rows, and its share of that of the normed tokens.

    Args:
        weights, x, scale: as in `part_score` and `decoder.head_loss`.
        scores: as all parts left them.
        dnormed: s [M, H]; written where `opening`, else added to.
        grad: g [r, H].
        scratch: part_scratch(gradient=True).
    """
    kernels, cap = decoder.kernels, decoder.shape.variant.logit_cap
    for start in range(0, batch.tokens, chunk):
        rows = slice(start, min(start + chunk, batch.tokens))
        normed, logits = _logits(decoder, weights, x[rows], scratch)
        if cap is not None:
            capped = scratch["capped"][: len(logits)]
            capped.copy_(logits)
        _logit_gradients(logits, batch.targets[rows], ids, scores["lse"][rows], scale, scratch["slab"])
        if cap is not None:
            kernels.softcap_backward(logits, capped, 1.0, cap)
        weight_gradient(kernels, logits, normed, grad, first and start == 0, scratch)
        sum_input_gradients(kernels, logits, weights["weight"], dnormed[rows], opening, scratch)


def head_close(
    decoder: Decoder,
    weights: Tensors,
    batch: TokenBatch,
    x: Tensor,
    chunk: int,
    scores: Tensors,
    dnormed: Tensor,
    dx: Tensor,
    grads: Tensors,
    scratch: Tensors,
    first: bool,
) -> tuple[float, int]:
    """After all parts: the gradient of the normed tokens is rounded once and goes through the final norm.

    Args:
        weights, grads: the norm's.
        scores, dnormed: as all parts left them.
        x: c [M, H]; dx: c [M, H], written, may be x.
        scratch: close_scratch.

    Returns:
        As `decoder.head_loss`.
    """
    kernels, norm = decoder.kernels, decoder.shape.norm
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, batch.tokens, chunk):
        rows = slice(start, min(start + chunk, batch.tokens))
        count = rows.stop - start
        total += _losses(batch.targets[rows], scores, rows).sum(dtype=torch.float64)
        narrow = scratch["dnormed"][:count]
        kernels.cast(narrow, dnormed[rows])
        norm_forward(kernels, norm, weights, "norm", x[rows], scratch["normed"][:count], scratch)
        norm_backward(
            kernels, norm, weights, "norm", narrow, x[rows], scratch, narrow, grads, None,
            first and start == 0,
        )  # fmt: skip
        dx[rows].copy_(narrow)
    return float(total), batch.targets_count


def tally(batch: TokenBatch, scores: Tensors, chunk: int, token_bytes: Tensor | None = None) -> Tally:
    """The sums of `decoder.head_evaluate`; the loss has the bits of `head_close`."""
    total, byte_loss = torch.zeros(2, dtype=torch.float64, device=batch.ids.device)
    correct = size = 0
    for start in range(0, batch.tokens, chunk):
        rows = slice(start, min(start + chunk, batch.tokens))
        targets = batch.targets[rows]
        loss = _losses(targets, scores, rows)
        correct += int((scores["best_id"][rows] == targets).sum())
        total += loss.sum(dtype=torch.float64)
        if token_bytes is not None:
            sizes = token_bytes[targets.clamp(min=0)] * (targets >= 0)
            size += int(sizes.sum())
            byte_loss += (loss * (sizes > 0)).sum(dtype=torch.float64)
    return Tally(float(total), batch.targets_count, correct, float(byte_loss), size)


def _logits(decoder: Decoder, weights: Tensors, x: Tensor, scratch: Tensors) -> tuple[Tensor, Tensor]:
    """(normed, logits) of x: c [C, H]."""
    normed, logits = scratch["normed"][: len(x)], scratch["logits"][: len(x)]
    norm_forward(decoder.kernels, decoder.shape.norm, weights, "norm", x, normed, scratch)
    linear(normed, weights["weight"], logits, scratch)
    cap = decoder.shape.variant.logit_cap
    if cap is not None:
        decoder.kernels.softcap(logits, 1.0, cap)
    return normed, logits


def _targets(targets: Tensor, ids: range) -> tuple[Tensor, Tensor]:
    """(tokens, rows of the part) of those whose target a part holds. Ignored targets are negative."""
    tokens = ((targets >= ids.start) & (targets < ids.stop)).nonzero()[:, 0]
    return tokens, targets[tokens] - ids.start


def _logit_gradients(
    logits: Tensor, targets: Tensor, ids: range, lse: Tensor, scale: float, slab: Tensor
) -> None:
    """logits = (exp(logits - lse) - [target]) * scale, 0 where the target is ignored; a few rows at a
    time, in the wider dtype. slab: s, room for these rows."""
    step = len(slab) // logits.shape[1]
    for start in range(0, len(logits), step):
        rows = slice(start, min(start + step, len(logits)))
        wide = slab[: (rows.stop - start) * logits.shape[1]].view(rows.stop - start, -1)
        wide.copy_(logits[rows])
        wide.sub_(lse[rows, None]).exp_()
        tokens, found = _targets(targets[rows], ids)
        wide[tokens, found] -= 1.0
        wide.mul_(scale)
        wide[targets[rows] < 0] = 0.0
        logits[rows].copy_(wide)


def _losses(targets: Tensor, scores: Tensors, rows: slice) -> Tensor:
    """s [C], 0 where the target is ignored."""
    return (scores["lse"][rows] - scores["target"][rows]).where(targets >= 0, 0.0)
