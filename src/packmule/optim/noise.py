"""Gradient noise scale: the batch beyond which more rows hardly help. Pure arithmetic, no torch.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: the squared norm of a gradient averaged over
B examples is on average |G|^2 + tr(Sigma) / B, so the norms at two batch sizes give both terms; the
simple noise scale is tr(Sigma) / |G|^2. The two sizes here are a micro-batch and the whole step, and
the gradients those of the normalization weights, which predict the scale of all (Gray et al. 2024,
arXiv:2411.00999) and are so small that a micro-batch's share of them is a by-product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.95
"""Weight of the past in the running means: one step's estimates are far too noisy to divide."""


@dataclass(frozen=True)
class Noise:
    """One step's unbiased estimates; either may be negative.

    Attributes:
        trace: tr(Sigma), the variance of a single target's gradient.
        square: |G|^2 of the true gradient.
    """

    trace: float
    square: float


def estimate(parts: Sequence[tuple[float, int]], whole: float) -> Noise | None:
    """From the micro-batches of one step.

    Args:
        parts: per micro-batch, the squared norm of its contribution to the gradient of the mean loss,
            and its targets.
        whole: the squared norm of their sum.

    Returns:
        None where fewer than two micro-batches have targets.
    """
    used = [(square, targets) for square, targets in parts if targets]
    if len(used) < 2:
        return None
    total = sum(targets for _, targets in used)
    # A contribution is weighted by its share of the targets; undone, it is a mean like the whole.
    small = sum(square * (total / targets) ** 2 for square, targets in used) / len(used)
    inverse = sum(1.0 / targets for _, targets in used) / len(used)
    trace = (small - whole) / (inverse - 1.0 / total)
    return Noise(trace, whole - trace / total)


class NoiseScale:
    """The ratio of running means, in targets. Feed it all estimates in order, also after a resume."""

    def __init__(self) -> None:
        self._trace = self._square = 0.0

    def add(self, noise: Noise) -> float | None:
        """The scale after one more estimate; None while the mean of |G|^2 is not positive."""
        keep = SMOOTHING
        self._trace = keep * self._trace + (1.0 - keep) * noise.trace
        self._square = keep * self._square + (1.0 - keep) * noise.square
        return max(0.0, self._trace) / self._square if self._square > 0.0 else None
