"""JournaledStore: a run's state whose commits let the log be written first."""

from __future__ import annotations

from collections.abc import Callable

from packmule.checkpoint.head import Head, Progress
from packmule.checkpoint.store import StateStore


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
