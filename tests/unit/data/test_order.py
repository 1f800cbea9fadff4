"""The seeded order is a bijection that can be entered anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from packmule.data.order import permute

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def slow(index: int, n: int, seed: int, epoch: int) -> int:
    """The same network on Python integers, one index at a time."""

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        return word ^ (word >> 31)

    half = 1
    while 4**half < n:
        half += 1
    state = mix((mix((seed + GOLDEN) & MASK) + epoch * GOLDEN + 1) & MASK)
    while True:
        left, right = index >> half, index & (2**half - 1)
        for number in range(6):
            key = mix((state + (number + 1) * GOLDEN) & MASK)
            left, right = right, left ^ (mix((right + key) & MASK) & (2**half - 1))
        index = (left << half) | right
        if index < n:
            return index


def test_every_index_appears_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for n in (*range(1, 70), 255, 256, 257, 1000, 4097, *rng.integers(2, 50_000, 8).tolist()):
        order = permute(np.arange(n), n, seed, 3)
        assert np.array_equal(np.sort(order), np.arange(n)), n


def test_order_equals_the_scalar_network(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for n in (1, 2, 3, 17, 1000, 2**31 + 11, 10**12, 2**62):
        index = rng.integers(0, n, 20)
        epoch = int(rng.integers(-1, 1000))
        assert permute(index, n, seed, epoch).tolist() == [slow(i, n, seed, epoch) for i in index.tolist()]


def test_one_entry_costs_the_same_at_any_place() -> None:
    far = permute(np.array([10**17]), 10**18, 1, 10**9)
    assert far.shape == (1,) and 0 <= far[0] < 10**18


def test_epochs_and_seeds_give_unrelated_orders(seed: int) -> None:
    n = 2000
    base = permute(np.arange(n), n, seed, 0)
    for other in (permute(np.arange(n), n, seed, 1), permute(np.arange(n), n, seed + 1, 0)):
        # unrelated orders agree in about one place
        assert (base == other).sum() < 12
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.12


@pytest.mark.parametrize("n", [7, 20, 64])
def test_first_item_is_spread_evenly_over_epochs(n: int, seed: int) -> None:
    first = np.array([permute(np.array([0]), n, seed, epoch)[0] for epoch in range(100 * n)])
    counts = np.bincount(first, minlength=n)
    # chi-square with n - 1 degrees of freedom: mean n - 1, deviation sqrt(2 (n - 1))
    assert ((counts - 100) ** 2 / 100).sum() < n - 1 + 8 * (2 * (n - 1)) ** 0.5


@pytest.mark.parametrize(("index", "n"), [([5], 5), ([-1], 5), ([0], 0)])
def test_out_of_range_is_refused(index: list[int], n: int) -> None:
    with pytest.raises(ValueError):
        permute(np.array(index), n, 0, 0)
