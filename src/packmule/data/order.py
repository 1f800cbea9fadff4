"""A seeded order of [0, n) that can be entered anywhere in constant time and memory.

A balanced Feistel network (Luby and Rackoff 1988) permutes the next even power of two; indices
that land outside [0, n) are sent through again until they land inside (cycle walking: Black and
Rogaway 2002), which keeps it a bijection and takes under four passes on average.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where each index of [0, n) stands in the order of this seed and epoch.

    Args:
        index: integers [M], each in [0, n).
        n: how many items are ordered, 1 to 2**62.
        seed: any integer; orders of different seeds are unrelated.
        epoch: any integer; orders of different epochs are unrelated.

    Returns:
        int64 [M]. Over all of [0, n) it is a bijection onto [0, n).

    Raises:
        ValueError: n or an index is out of range.
    """
    value = np.asarray(index, dtype=np.int64)
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"n = {n} is not in [1, 2**62]")
    if value.size and not 0 <= int(value.min()) <= int(value.max()) < n:
        raise ValueError(f"an index is not in [0, {n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    out = _feistel(value.astype(np.uint64), half, keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _feistel(out[outside], half, keys)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64)


def ordered(n: int, seed: int, cursor: int, count: int) -> tuple[int, ...]:
    """The `count` items from global position `cursor` on, of an endless sequence of epochs over [0, n).

    An epoch ends inside without a gap, and each item comes once per epoch.
    """
    found: list[int] = []
    while len(found) < count:
        epoch, first = divmod(cursor + len(found), n)
        last = min(n, first + count - len(found))
        found += permute(np.arange(first, last), n, seed, epoch).tolist()
    return tuple(found)


def _mix(word: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014) on one integer."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    state = _mix((_mix((seed + _GAMMA) & _MASK) + epoch * _GAMMA + 1) & _MASK)
    return tuple(np.uint64(_mix((state + (i + 1) * _GAMMA) & _MASK)) for i in range(_ROUNDS))


def _feistel(value: np.ndarray, half: int, keys: tuple[np.uint64, ...]) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        word = right + key
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((word ^ (word >> np.uint64(31))) & mask)
    return (left << bits) | right
