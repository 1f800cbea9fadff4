"""Weighted mixes: exact shares in every period, near them everywhere, entered anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from packmule.data.mixes import MOST_PLACES, Mix, whole_weights
from packmule.errors import ConfigError


@pytest.mark.parametrize(("weights", "expected"), [
    ([0.7, 0.3], (7, 3)),
    ([1, 1], (1, 1)),
    ([0.1, 0.2, 0.7], (1, 2, 7)),
    ([3, 1.5], (2, 1)),
    ([0.333, 0.667], (333, 667)),
    ([1e-3, 1], (1, 1000)),
    ([5], (1,)),
])  # fmt: skip
def test_weights_are_taken_as_they_are_written(weights: list[float], expected: tuple[int, ...]) -> None:
    assert whole_weights(weights) == expected


@pytest.mark.parametrize(
    "weights", [[0.0, 1.0], [-1.0, 2.0], [float("nan")], [float("inf")], [0.123456789, 1.0]]
)
def test_weights_that_cannot_be_exact_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        whole_weights(weights)


def test_shares_are_exact_in_every_period_and_within_one_everywhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = [rng.integers(1, 40, int(rng.integers(1, 8))).tolist() for _ in range(40)] + [
        [1, 9999],
        [500, 499],
    ]
    for weights in cases:
        total = sum(weights)
        source, _ = Mix(weights).at(np.arange(3 * total))
        counts = np.stack([np.cumsum(source == s) for s in range(len(weights))])
        for period in (1, 2, 3):
            assert counts[:, period * total - 1].tolist() == [period * w for w in weights]
        # |count - n w / W| < 1, in whole numbers
        n = np.arange(1, 3 * total + 1)
        off = np.abs(counts * total - n * np.array(weights)[:, None])
        assert off.max() < total, weights


def test_any_place_is_found_without_those_before_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 30, 5).tolist()
    mix = Mix(weights)
    source, turn = mix.at(np.arange(1000))
    seen = [0] * len(weights)
    for place in range(1000):
        assert turn[place] == seen[source[place]]
        seen[source[place]] += 1
    for place in rng.integers(0, 1000, 50):
        assert [int(part[0]) for part in mix.at(np.array([place]))] == [source[place], turn[place]]
    far = 10**15 * mix.period + 7
    at, before = mix.at(np.array([far]))
    assert at[0] == source[7]
    assert before[0] == 10**15 * weights[source[7]] + turn[7]


def test_the_longest_period_is_as_long_as_said() -> None:
    assert sum(whole_weights([1, MOST_PLACES - 1])) == MOST_PLACES
    with pytest.raises(ConfigError):
        whole_weights([1, MOST_PLACES])
