"""The gradient noise scale against its analytic value on a quadratic."""

from __future__ import annotations

import numpy as np
import pytest

from packmule.optim.noise import Noise, NoiseScale, estimate


def test_on_a_quadratic_the_estimates_average_to_the_analytic_values(seed: int) -> None:
    """Loss |w - x|^2 / 2 with x normal: an example's gradient is w - x, so G = w - mean, Sigma = covariance.
    Micro-batches of unequal sizes, as steps have them."""
    rng = np.random.default_rng(seed)
    width = 12
    mean, deviation = rng.normal(size=width), rng.uniform(0.5, 2.0, width)
    weights = mean + rng.normal(size=width) * 0.7
    true_square, true_trace = float(((weights - mean) ** 2).sum()), float((deviation**2).sum())
    found, scale, last = [], NoiseScale(), None
    for _ in range(4000):
        sizes = rng.integers(1, 9, 4)
        total = int(sizes.sum())
        sums = [(weights - rng.normal(mean, deviation, (n, width))).sum(0) / total for n in sizes]
        noise = estimate(
            [(float((part**2).sum()), int(n)) for part, n in zip(sums, sizes, strict=True)],
            float((np.sum(sums, 0) ** 2).sum()),
        )
        assert noise is not None
        found.append((noise.trace, noise.square))
        last = scale.add(noise) or last
    trace, square = np.mean(found, 0)
    assert trace == pytest.approx(true_trace, rel=0.1)
    assert square == pytest.approx(true_square, rel=0.1)
    assert trace / square == pytest.approx(true_trace / true_square, rel=0.2)
    assert last == pytest.approx(true_trace / true_square, rel=1.5)


def test_without_noise_the_scale_is_zero_and_without_gradient_there_is_none() -> None:
    scale = NoiseScale()
    assert scale.add(estimate([(0.25, 4), (0.25, 4)], 1.0)) == 0.0  # type: ignore[arg-type]
    assert NoiseScale().add(Noise(trace=3.0, square=-0.1)) is None


def test_one_micro_batch_has_no_noise_to_see() -> None:
    assert estimate([(1.0, 9)], 1.0) is None
    assert estimate([(1.0, 9), (0.0, 0)], 1.0) is None
    assert estimate([], 0.0) is None
