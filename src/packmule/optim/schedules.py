"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math

from packmule.spec.plan import ScheduleNumerics


def learning_rate(schedule: ScheduleNumerics, step: int) -> float:
    """The rate of optimizer step `step` (0 for the first).

    Warm-up is linear from 0 (the first step has 1/warmup of the rate); then constant, linear or
    half-cosine (Loshchilov and Hutter 2017, arXiv:1608.03983) down to `minimum` at total_steps.
    """
    top, low, warm = schedule.learning_rate, schedule.minimum, schedule.warmup_steps
    if step < warm:
        return top * (step + 1) / warm
    if schedule.kind == "constant":
        return top
    done = min(1.0, (step - warm) / max(1, schedule.total_steps - warm))
    share = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return low + (top - low) * share
