"""execute: run a StepGraph with real bodies. Knows threads, order and the ledger; no torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from packmule.graph.schedule import Schedule
from packmule.graph.step import StepGraph
from packmule.spec.timeline import Timeline
from packmule.tiers.ledger import Ledger


class Stopped(Exception):
    """The execution was stopped between tasks; nothing after `task` has started.

    Args:
        task: the last task that ended, or -1.
    """

    def __init__(self, task: int) -> None:
        super().__init__(f"stopped after task {task}")
        self.task = task


class _Run:
    """One execution: a schedule behind a lock, lanes of threads that run bodies."""

    def __init__(
        self,
        graph: StepGraph,
        body: Callable[[int], None],
        ledger: Ledger,
        stop_after: int | None,
        stopping: Callable[[], bool] | None,
    ) -> None:
        self._graph = graph
        self._body = body
        self._ledger = ledger
        self._stop_after = stop_after
        self._stopping = stopping
        self._schedule = Schedule(graph)
        self._home = [int(graph.uses.row(t)[0]) for t in range(graph.tasks)]
        self._queues: list[deque[int]] = [deque() for _ in graph.resources]
        self._lock = threading.Lock()
        self._wake = [threading.Condition(self._lock) for _ in graph.resources]
        self._began = time.perf_counter()
        self._last = -1
        self._stop = False
        self.error: BaseException | None = None
        self.stopped: int | None = None
        self.start = np.zeros(graph.tasks)
        self.end = np.zeros(graph.tasks)
        self.times: list[float] = [0.0]

    def now(self) -> float:
        return time.perf_counter() - self._began

    def lanes(self) -> list[int]:
        """Threads per resource: as many as its home tasks can run at once."""
        least: dict[int, int] = {}
        starts = self._graph.uses.starts
        for task, home in enumerate(self._home):
            amount = int(self._graph.amounts[starts[task]])
            least[home] = min(least.get(home, amount), amount)
        capacity = self._graph.capacity.tolist()
        return [
            max(1, capacity[r] // least[r]) if least.get(r) else int(r in least) for r in range(len(capacity))
        ]

    def dispatch(self) -> None:
        """Start what may start. Caller holds the lock."""
        if self._stop or self.error:
            return
        for task in self._schedule.start():
            self._queues[self._home[task]].append(task)
            self._wake[self._home[task]].notify()

    @property
    def _over(self) -> bool:
        return self._stop or self.error is not None or not self._schedule.left

    def work(self, resource: int) -> None:
        """Run tasks of one resource until nothing is left or the run stops."""
        try:
            while (task := self._next(resource)) is not None:
                self._body(task)
                self._ended(task)
        except BaseException as error:  # latched; raised again by execute()
            with self._lock:
                self.error = self.error or error
                self._notify_all()

    def _next(self, resource: int) -> int | None:
        """Wait for a task of a resource and start it; None when there will be none."""
        queue, wake = self._queues[resource], self._wake[resource]
        with self._lock:
            while not queue and not self._over:
                wake.wait()
            if self._over:
                return None
            if self._stopping is not None and self._stopping():
                self._halt()
                return None
            task = queue.popleft()
            self._ledger.start(task)
            self.start[task] = self.now()
            self.times.append(self.start[task])
            return task

    def _ended(self, task: int) -> None:
        with self._lock:
            self.end[task] = self.now()
            self.times.append(self.end[task])
            self._ledger.end(task)
            self._schedule.end(task)
            self._last = task
            if task == self._stop_after:
                self._halt()
            self.dispatch()
            if self._over:
                self._notify_all()

    def _halt(self) -> None:
        self._stop = True
        self.stopped = self._last
        self._notify_all()

    def _notify_all(self) -> None:
        for condition in self._wake:
            condition.notify_all()


def execute(
    graph: StepGraph,
    body: Callable[[int], None],
    *,
    ledger: Ledger | None = None,
    main: str | None = None,
    stop_after: int | None = None,
    stopping: Callable[[], bool] | None = None,
) -> Timeline:
    """Run every task of a graph, each on the thread of its home resource.

    Args:
        graph: what to run.
        body: runs one task; called from one thread per unit of concurrency of a resource.
        ledger: keeps the books; a new one by default.
        main: the resource whose tasks run on the calling thread (for torch: one thread only).
        stop_after: nothing starts once this task has ended; raises Stopped.
        stopping: asked before each task; True stops likewise.

    Returns:
        The measured Timeline.

    Raises:
        Stopped: as above, after tasks under way have ended.
        BaseException: the first error a body raised.
    """
    books = ledger or Ledger(graph)
    run = _Run(graph, body, books, stop_after, stopping)
    home = graph.resources.index(main) if main is not None else -1
    threads = [
        threading.Thread(
            target=run.work, args=(resource,), daemon=True, name=f"packmule-{graph.resources[resource]}"
        )
        for resource, lanes in enumerate(run.lanes())
        for _ in range(0 if resource == home else lanes)
    ]
    with run._lock:
        run.dispatch()
    for thread in threads:
        thread.start()
    if home >= 0:
        run.work(home)
    for thread in threads:
        thread.join()
    if run.error is not None:
        raise run.error
    if run.stopped is not None:
        raise Stopped(run.stopped)
    columns = np.array(books.rows, np.int64).reshape(-1, len(graph.tiers))
    return Timeline(
        run.start,
        run.end,
        np.array(run.times),
        np.array(books.tasks, np.int64),
        {name: columns[:, index] for index, name in enumerate(graph.tiers)},
        {name: books.extent[index] for index, name in enumerate(graph.tiers)},
    )
