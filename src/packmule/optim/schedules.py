"""Schedules: what the steps of a run have of their own, as pure functions of the step.

`rates` is what an update rule is told of a step. A rule that averages its iterates instead of
following a decay (Schedule-Free: Defazio et al. 2024, arXiv:2405.15682) needs the weight of the
step beside the learning rate; rules that do not average leave it alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from packmule.optim.rule import Update
from packmule.spec.growth import rows_at
from packmule.spec.plan import Numerics, ScheduleNumerics
from packmule.spec.turns import turn_at


@dataclass(frozen=True)
class Rates:
    """One step's.

    Attributes:
        learning_rate: of the update.
        weight: of the step's iterate in an average of iterates: the square of the learning rate
            (Defazio et al. 2024, section 3); the average divides by the sum over the steps so far.
    """

    learning_rate: float
    weight: float


def update_at(numerics: Numerics, groups: int, step: int) -> Update:
    """What the updates of step `step` (0 for the first) share.

    Args:
        groups: of blocks that take turns; 0: all blocks are updated in every step.
    """
    if numerics.turns is None:
        return Update(step + 1, rates(numerics, step).learning_rate)
    turn = turn_at(numerics.turns, groups, numerics.seed, step)
    rate = rates(numerics, step, turn.rate_step).learning_rate
    return Update(step + 1, rate, age=turn.age, group=turn.group)


def rates(numerics: Numerics, step: int, scheduled: int | None = None) -> Rates:
    """Of optimizer step `step` (0 for the first).

    Args:
        scheduled: the step at which the schedule stands, where it lags behind.
    """
    rate = learning_rate(numerics.schedule, step if scheduled is None else scheduled)
    scaling = numerics.schedule.scaling
    if scaling != "off":
        share = rows_at(numerics.growth, numerics.rows, step) / (numerics.schedule.base_rows or numerics.rows)
        rate *= share if scaling == "linear" else math.sqrt(share)
    return Rates(rate, rate * rate)


def learning_rate(schedule: ScheduleNumerics, step: int) -> float:
    """The rate of optimizer step `step` (0 for the first), for a whole batch.

    Warm-up is linear from 0 (the first step has 1/warmup of the rate). Then, down to `minimum` at
    total_steps: constant (never), linear, half-cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983), or wsd: constant until the last `decay_steps` (warm-up, stable, decay: Hu et
    al. 2024, arXiv:2404.06395, section 4.2), which fall linearly, as a half-cosine, or as 1 - sqrt
    (Haegele et al. 2024, arXiv:2405.18392).
    """
    top, low, warm = schedule.learning_rate, schedule.minimum, schedule.warmup_steps
    if step < warm:
        return top * (step + 1) / warm
    if schedule.kind == "constant":
        return top
    start: int = warm
    shape: str = schedule.kind
    if schedule.kind == "wsd":
        start, shape = max(warm, schedule.total_steps - schedule.decay_steps), schedule.decay_shape
    done = min(1.0, max(0.0, (step - start) / max(1, schedule.total_steps - start)))
    return low + (top - low) * _left(shape, done)


def _left(shape: str, done: float) -> float:
    """What is left of the rate after a share of the descent."""
    if shape == "linear":
        return 1.0 - done
    return 1.0 - math.sqrt(done) if shape == "sqrt" else 0.5 * (1.0 + math.cos(math.pi * done))
