"""Addresses for buffers with known lifetimes, and the edges that reuse of an address needs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np


def assign_offsets(
    first: np.ndarray, last: np.ndarray, size: np.ndarray, until: np.ndarray | None = None
) -> np.ndarray:
    """Place intervals greedily, largest first, each at the lowest address free over its life.

    (The "greedy by size" rule of Pisarchyk and Lee 2020, arXiv:2001.03288.)

    Args:
        first, last: int64 [buffers], inclusive lifetimes in program order.
        size: int64 [buffers], bytes.
        until: int64 [buffers], `last` or later: a buffer keeps its bytes so long from all but those that
            linger like it, because its last task may still be under way then.

    Returns:
        int64 [buffers], offsets such that buffers alive together do not overlap.
    """
    count = len(first)
    offset = np.zeros(count, np.int64)
    order = np.lexsort((first, -size))
    placed = np.zeros(count, np.int64)  # indices in placement order
    kept = last if until is None else until
    lingers = kept > last
    for number, buffer in enumerate(order.tolist()):
        done = placed[:number]
        alike = lingers[done] & lingers[buffer]
        before = first[done] <= np.where(alike, last[buffer], kept[buffer])
        alive = done[before & (np.where(alike, last[done], kept[done]) >= first[buffer])]
        address = 0
        if len(alive):
            starts = offset[alive]
            rank = np.argsort(starts, kind="stable")
            starts, ends = starts[rank], (starts + size[alive])[rank]
            top = np.maximum.accumulate(ends)
            gap_starts = np.concatenate(([0], top))
            gap_ends = np.concatenate((starts, [np.iinfo(np.int64).max]))
            address = int(gap_starts[np.flatnonzero(gap_ends - gap_starts >= size[buffer])[0]])
        offset[buffer] = address
        placed[number] = buffer
    return offset


def reuse_pairs(
    first: np.ndarray, last: np.ndarray, offset: np.ndarray, size: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Pairs (earlier, later) where `later` takes over bytes that `earlier` held last.

    Older holders of those bytes are ordered before `earlier` already.
    """
    starts: list[int] = []  # start of each piece of address space, ascending
    ends: list[int] = []
    holders: list[int] = []
    for buffer in np.argsort(first, kind="stable").tolist():
        low, high = int(offset[buffer]), int(offset[buffer] + size[buffer])
        if low == high:
            continue
        begin = bisect_right(ends, low)
        stop = bisect_left(starts, high)
        pieces = list(zip(starts[begin:stop], ends[begin:stop], holders[begin:stop], strict=True))
        for holder in dict.fromkeys(piece[2] for piece in pieces):
            yield holder, buffer
        kept = [(s, low, h) for s, _, h in pieces[:1] if s < low]
        kept.append((low, high, buffer))
        kept += [(high, e, h) for _, e, h in pieces[-1:] if e > high]
        starts[begin:stop] = [piece[0] for piece in kept]
        ends[begin:stop] = [piece[1] for piece in kept]
        holders[begin:stop] = [piece[2] for piece in kept]
