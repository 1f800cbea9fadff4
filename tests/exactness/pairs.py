"""Pairwise covering arrays: few rows in which every two choices of different axes meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs a row covers."""
    return {(a, row[a], b, row[b]) for a, b in combinations(sorted(row), 2)}


def every_row(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> Iterator[Row]:
    """The full product, less what is not allowed."""
    for values in product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        if allowed(row):
            yield row


def covering_rows(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], rng: random.Random, tries: int = 400
) -> list[Row]:
    """Rows that cover every pair which some allowed row has; greedy, the best of `tries` each time.

    A try starts from a pair that is still open and fills in the other axes at random; where
    none of them is allowed, the full product decides whether the pair exists at all.
    """
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
            best = next(every_row(fixed, allowed), None)
        if best is None:
            open_pairs.discard(start)
            continue
        rows.append(best)
        open_pairs -= pairs_of(best)
    return rows
