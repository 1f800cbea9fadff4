"""Early stopping and the best step follow from the log alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from packmule.errors import ConfigError
from packmule.spec.job import Train
from packmule.train.stopping import Standing, check_metric, standing, stops


def log(key: str, values: list[float]) -> list[dict[str, Any]]:
    """An evaluation every ten steps, among other entries."""
    entries: list[dict[str, Any]] = []
    for index, value in enumerate(values):
        entries += [{"step": 10 * index, key: value}, {"step": 10 * index + 1, "train/loss": 0.0}]
    return entries


def settings(**fields: Any) -> Train:
    return Train(eval_steps=10, **fields)


def plain(values: list[float], patience: int, delta: float) -> int | None:
    """The evaluation after which a loop would stop."""
    mark, waited = float("inf"), 0
    for index, value in enumerate(values):
        if value < mark - delta:
            mark, waited = value, 0
        else:
            waited += 1
            if waited >= patience:
                return index
    return None


def test_a_run_stops_where_a_loop_that_counts_would(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        values = [rng.uniform(1, 2) for _ in range(12)]
        patience, delta = rng.randint(1, 4), rng.choice((0.0, 0.1))
        train = settings(early_stop_patience=patience, early_stop_min_delta=delta)
        wanted = plain(values, patience, delta)
        found = next((i for i in range(12) if stops(log("eval/loss", values[: i + 1]), train)), None)
        assert found == wanted, (values, patience, delta)
        best = standing(log("eval/loss", values), train)
        assert (best.best, best.best_step) == (min(values), 10 * values.index(min(values)))


def test_accuracy_is_better_when_higher_on_any_set() -> None:
    train = settings(best_metric="books/accuracy", early_stop_patience=2)
    entries = log("eval/books/accuracy", [0.1, 0.5, 0.4, 0.3])
    assert standing(entries, train) == Standing(best_step=10, best=0.5, waited=2)
    assert stops(entries, train)
    assert not stops(entries[:-2], train)


def test_nothing_stops_without_patience_or_before_an_evaluation() -> None:
    assert not stops(log("eval/loss", [1.0, 2.0, 3.0]), settings())
    assert not stops([], settings(early_stop_patience=1))
    assert standing([], settings()) == Standing()


def test_a_metric_that_is_never_measured_is_refused_with_the_nearest() -> None:
    check_metric("eval/loss", ["validation"])
    check_metric("eval/books/bits_per_byte", ["books", "code"])
    with pytest.raises(ConfigError) as caught:
        check_metric("eval/acuracy", ["validation"])
    assert caught.value.hint == "did you mean `eval/accuracy`?"
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        check_metric("eval/loss", [])
