"""Early stopping and the best step, as functions of the log. No torch, nothing kept.

What a run has logged decides, so a run that was interrupted decides as one that was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packmule.errors import ConfigError
from packmule.spec.job import Train
from packmule.spec.records import nearest
from packmule.train.folder import HELD_OUT

RISING = frozenset({"accuracy"})
"""Metrics that are better when higher; all others are better when lower."""

METRICS = ("loss", "perplexity", "bits_per_byte", "accuracy")
"""What is measured on each evaluation set of a text."""


def metric_keys(sets: Iterable[str], metrics: Sequence[str] = METRICS) -> list[str]:
    """Keys of the log for the metrics of evaluation sets."""
    return [metric_key(name, metric) for name in sets for metric in metrics]


def metric_key(name: str, metric: str) -> str:
    """The key in the log of a set's metric; held-out rows have no name there."""
    return f"eval/{metric}" if name == HELD_OUT else f"eval/{name}/{metric}"


def check_metric(metric: str, sets: Iterable[str], metrics: Sequence[str] = METRICS) -> None:
    """Raise ConfigError unless a run with these evaluation sets and metrics logs the metric."""
    known = metric_keys(sets, metrics)
    if metric in known:
        return
    if not known:
        raise ConfigError(
            f"`train.best_metric` = {metric!r} is never measured: there is nothing to evaluate on.",
            "hold data out with `data.val_size`, or give `data.val_path` (`data.val_factory`, for modules of "
            "one's own)",
        )
    guess = nearest(metric, known)
    raise ConfigError(
        f"`train.best_metric` = {metric!r} is not measured.",
        f"did you mean `{guess}`?" if guess else f"measured are {', '.join(known)}",
    )


@dataclass(frozen=True)
class Standing:
    """How a run's evaluations stand.

    Attributes:
        best_step: of the best value; None before the first.
        best: that value.
        waited: evaluations since the last that was better by more than min_delta.
    """

    best_step: int | None = None
    best: float | None = None
    waited: int = 0


def standing(log: Iterable[Mapping[str, Any]], train: Train) -> Standing:
    """From the entries of a log, in order."""
    found, mark = Standing(), None
    sign = -1.0 if train.best_metric.rpartition("/")[2] in RISING else 1.0
    for entry in log:
        value = entry.get(train.best_metric)
        if value is None:
            continue
        better = found.best is None or sign * value < sign * found.best
        enough = mark is None or sign * value < sign * mark - train.early_stop_min_delta
        mark = value if enough else mark
        found = Standing(
            entry["step"] if better else found.best_step,
            value if better else found.best,
            0 if enough else found.waited + 1,
        )
    return found


def stops(log: Iterable[Mapping[str, Any]], train: Train) -> bool:
    """Whether a run ends here although steps are left."""
    patience = train.early_stop_patience
    return patience is not None and standing(log, train).waited >= patience
