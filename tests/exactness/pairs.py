"""Pairwise covering arrays: few rows in which every two choices of different axes meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs a row covers."""
    return {(a, row[a], b, row[b]) for a, b in combinations(sorted(row), 2)}


LARGE = 20_000
"""Rows of a product that is not looked through for a pair."""

MOST_REFUSED = 2_000
"""Tries in a row without success after which no row is thought to be allowed."""


def every_row(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> Iterator[Row]:
    """The full product, less what is not allowed."""
    for values in product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        if allowed(row):
            yield row


def random_rows(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], rng: random.Random
) -> Iterator[Row]:
    """Rows at random, less what is not allowed; ends when nothing was for a long time."""
    refused = 0
    while refused < MOST_REFUSED:
        row = {name: rng.choice(values) for name, values in axes.items()}
        refused = 0 if allowed(row) else refused + 1
        if not refused:
            yield row


def covering_rows(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], rng: random.Random, tries: int = 400
) -> list[Row]:
    """Rows that cover every pair which some allowed row has; greedy, the best of `tries` each time.

    A try starts from a pair that is still open and fills in the other axes at random; where
    none of them is allowed, the full product decides whether the pair exists at all, or where that
    is too large to look through, many more tries.
    """
    total = prod(len(values) for values in axes.values())
    open_pairs = {
        (a, x, b, y) for a, b in combinations(sorted(axes), 2) for x, y in product(axes[a], axes[b])
    }
    rows: list[Row] = []
    while open_pairs:
        start = rng.choice(sorted(open_pairs, key=repr))
        best: Row | None = None
        most = 0
        for _ in range(tries):
            row = {name: rng.choice(values) for name, values in axes.items()}
            row[start[0]], row[start[2]] = start[1], start[3]
            if not allowed(row):
                continue
            covered = len(pairs_of(row) & open_pairs)
            if covered > most:
                best, most = row, covered
        if best is None:
            fixed = {**axes, start[0]: (start[1],), start[2]: (start[3],)}
            rows_left = every_row(fixed, allowed) if total < LARGE else random_rows(fixed, allowed, rng)
            best = next(rows_left, None)
        if best is None:
            open_pairs.discard(start)
            continue
        rows.append(best)
        open_pairs -= pairs_of(best)
    return rows
