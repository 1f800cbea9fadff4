"""Journal and JournaledStore: a step is in the log, durably, before a commit holds it. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packmule.checkpoint.head import Head, Progress
from packmule.checkpoint.store import StateStore
from packmule.optim.noise import Noise, NoiseScale
from packmule.train.folder import Log

if TYPE_CHECKING:
    from packmule.engine.runtime import Outcome


class JournaledStore(StateStore):
    """A StateStore that calls back before a commit.

    A crash between the commit of a step and its log entry would lose the entry for good, because
    nothing computes that step again. An entry without its commit is dropped at resume.

    Args:
        store: what it is like; not used any more.
        before_commit: makes the log durable up to the step that is committed.
    """

    def __init__(self, store: StateStore, before_commit: Callable[[Progress], None]) -> None:
        super().__init__(store.disk, store.folder, store.layout, store.checksum)
        self._before_commit = before_commit

    def commit(self, progress: Progress) -> Head:
        """As StateStore.commit, the log first."""
        self._before_commit(progress)
        return super().commit(progress)


@dataclass(frozen=True)
class _Entry:
    """What is known of a step's log entry when the step begins."""

    step: int
    rate: float
    tokens: int
    rows: tuple[int, ...]
    began: float
    fetched: float


class Journal:
    """The entries of a run's steps.

    Args:
        log: where they go.
        every: steps between two entries; the first step always has one.
    """

    def __init__(self, log: Log, every: int) -> None:
        self.log = log
        self._every = every
        self._entry: _Entry | None = None
        self._scale = NoiseScale()
        for trace, square in log.noise:
            self._scale.add(Noise(trace, square))

    def begin(
        self, step: int, rate: float, tokens: int, rows: tuple[int, ...], began: float, fetched: float
    ) -> None:
        """A step is under way.

        Args:
            step: its number, from 1 on.
            rate: learning rate.
            tokens: targets trained on when it has ended.
            rows: ids of its rows.
            began: time.monotonic() when it began.
            fetched: seconds since then in which nothing but its data was worked on.
        """
        self._entry = _Entry(step, rate, tokens, rows, began, fetched)

    def drop(self) -> None:
        """The step under way will not end."""
        self._entry = None

    def end(self, outcome: Outcome) -> None:
        """Log the step under way, unless it is logged."""
        entry, self._entry = self._entry, None
        if entry is None or (entry.step % self._every and entry.step != 1):
            return
        self.log.write(
            {
                "step": entry.step,
                "train/loss": outcome.loss,
                "train/learning_rate": entry.rate,
                "train/grad_norm": outcome.grad_norm,
                **({} if outcome.balance is None else {"train/router_aux_loss": outcome.balance}),
                **self._noise(outcome.noise),
                "tokens": entry.tokens,
                "seconds": round(time.monotonic() - entry.began, 4),
                "data_seconds": round(entry.fetched, 6),
                "rows": list(entry.rows),
            }
        )

    def _noise(self, noise: Noise | None) -> dict[str, float]:
        """The step's estimates, which a resume begins with, and the scale that all so far come to."""
        if noise is None:
            return {}
        scale = self._scale.add(noise)
        found = {"train/noise_trace": noise.trace, "train/noise_square": noise.square}
        return found if scale is None else {**found, "train/noise_scale": scale}

    def before_commit(self, step: int, outcome: Callable[[], Outcome]) -> None:
        """Make all entries up to a commit durable.

        Args:
            step: of the commit.
            outcome: of the step under way.
        """
        if self._entry is not None and self._entry.step == step:
            self.end(outcome())
        self.log.sync()
