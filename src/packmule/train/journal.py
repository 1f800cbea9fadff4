"""Journal and JournaledStore: a step is in the log, durably, before a commit holds it. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from packmule.checkpoint.head import Head, Progress
from packmule.checkpoint.store import StateStore
from packmule.train.folder import Log


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

    def begin(self, step: int, rate: float, tokens: int, rows: tuple[int, ...], began: float) -> None:
        """A step is under way.

        Args:
            step: its number, from 1 on.
            rate: learning rate.
            tokens: targets trained on when it has ended.
            rows: ids of its rows.
            began: time.monotonic() when it began.
        """
        self._entry = _Entry(step, rate, tokens, rows, began)

    def drop(self) -> None:
        """The step under way will not end."""
        self._entry = None

    def end(self, loss: float, grad_norm: float) -> None:
        """Log the step under way, unless it is logged."""
        entry, self._entry = self._entry, None
        if entry is None or (entry.step % self._every and entry.step != 1):
            return
        self.log.write(
            {
                "step": entry.step,
                "train/loss": loss,
                "train/learning_rate": entry.rate,
                "train/grad_norm": grad_norm,
                "tokens": entry.tokens,
                "seconds": round(time.monotonic() - entry.began, 4),
                "rows": list(entry.rows),
            }
        )

    def before_commit(self, step: int, result: Callable[[], tuple[float, float]]) -> None:
        """Make all entries up to a commit durable.

        Args:
            step: of the commit.
            result: gives loss and gradient norm of the step under way.
        """
        if self._entry is not None and self._entry.step == step:
            self.end(*result())
        self.log.sync()
