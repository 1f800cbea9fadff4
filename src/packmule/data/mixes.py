"""Weighted mixes: which source each place of an endless order comes from, in constant time.

The order is periodic. With whole weights w that add up to W, each W places hold source s exactly w[s]
times, and the first n places less than once more or less than n * w[s] / W times. Turn k of a source may
come from place floor(k W / w) on and must come before place ceil((k + 1) W / w); of those that may come, the
one that must come first does (Baruah et al. 1996, Proportionate progress; Tijdeman 1980, The chairman
assignment problem).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from packmule.errors import ConfigError

MOST_PLACES = 100_000
"""Longest period, so that weights may have about five digits."""


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportions, taking each weight as it is written in decimal.

    Raises:
        ConfigError: a weight that is not positive and finite, or proportions that need a longer period.
    """
    try:
        shares = [Fraction(repr(float(weight))) for weight in weights]
    except ValueError:
        raise ConfigError("a weight of `data.path` is not a finite number.", "use 0.7 or 3") from None
    if min(shares, default=Fraction(1)) <= 0:
        raise ConfigError("a weight of `data.path` is not above 0.", "leave that source out")
    scale = lcm(*(share.denominator for share in shares))
    counts = [int(share * scale) for share in shares]
    divisor = gcd(*counts)
    counts = [count // divisor for count in counts]
    if sum(counts) > MOST_PLACES:
        raise ConfigError(
            f"the weights of `data.path` need a period of {sum(counts)} rows to be exact; at most "
            f"{MOST_PLACES} are offered.",
            "use weights with fewer digits",
        )
    return tuple(counts)


class Mix:
    """The order in which sources follow each other.

    Args:
        weights: whole numbers above 0.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self.period = sum(weights)
        self._source = chairmen(weights)
        self._rank = np.empty(self.period, np.int64)
        for source, weight in enumerate(weights):
            self._rank[self._source == source] = np.arange(weight)

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many times it came before) of each place; both int64, like `places`."""
        period, place = np.divmod(places, self.period)
        source = self._source[place]
        return source, period * np.array(self.weights, np.int64)[source] + self._rank[place]


def chairmen(weights: Sequence[int]) -> np.ndarray:
    """One period: int64 [sum(weights)], the source of each place."""
    total = sum(weights)
    order = np.empty(total, np.int64)
    turns = [0] * len(weights)
    later = [(0, source) for source in range(len(weights))]  # (first place of its next turn, source)
    ready: list[tuple[int, int]] = []  # (place before which it must come, source)
    for place in range(total):
        while later and later[0][0] <= place:
            source = heappop(later)[1]
            heappush(ready, (-(-(turns[source] + 1) * total // weights[source]), source))
        source = heappop(ready)[1]
        order[place] = source
        turns[source] += 1
        heappush(later, (turns[source] * total // weights[source], source))
    return order
