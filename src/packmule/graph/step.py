"""StepGraph: tasks, resources, buffers and edges as numpy columns; its consistency check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Csr:
    """Lists of integers per row: row i is values[starts[i]:starts[i + 1]]."""

    starts: np.ndarray  # int64 [rows + 1]
    values: np.ndarray  # int64

    def row(self, index: int) -> np.ndarray:
        """The values of one row."""
        return self.values[self.starts[index] : self.starts[index + 1]]

    @classmethod
    def of(cls, rows: list[list[int]]) -> Csr:
        """From a list of lists."""
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(starts, np.array([value for row in rows for value in row], np.int64))


@dataclass(frozen=True)
class StepGraph:
    """One step of work. Task order is program order: each resource runs its tasks in it.

    Attributes:
        resources: names; `capacity` int64 [resources].
        kind, rank, block, micro, part: int64 [tasks]; -1 where a column does not apply.
        seconds: float64 [tasks], predicted duration.
        workspace: int64 [tasks], bytes held outside the arena while the task runs.
        moved: int64 [tasks], bytes the task transfers to or from disk.
        uses: per task, resource indices; `amounts` holds the units taken, aligned with
            `uses.values`. The first resource is the task's home: its thread runs the body.
        reads, writes: per task, buffer indices.
        deps: per task, tasks that must have ended.
        buffer_*: columns per buffer; `buffer_offset` within its tier, `buffer_first` and
            `buffer_last` the first and last task in program order that touch it (-1: none).
        buffer_persistent: lives before and after the graph.
    """

    resources: tuple[str, ...]
    capacity: np.ndarray
    kind: np.ndarray
    rank: np.ndarray
    block: np.ndarray
    micro: np.ndarray
    part: np.ndarray
    seconds: np.ndarray
    workspace: np.ndarray
    moved: np.ndarray
    uses: Csr
    amounts: np.ndarray
    reads: Csr
    writes: Csr
    deps: Csr
    tiers: tuple[str, ...]
    buffer_kind: np.ndarray
    buffer_tier: np.ndarray
    buffer_bytes: np.ndarray
    buffer_offset: np.ndarray
    buffer_first: np.ndarray
    buffer_last: np.ndarray
    buffer_persistent: np.ndarray
    buffer_rank: np.ndarray
    buffer_block: np.ndarray
    buffer_micro: np.ndarray
    buffer_part: np.ndarray

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    @property
    def buffers(self) -> int:
        """Number of buffers."""
        return len(self.buffer_kind)

    def extent(self, tier: int) -> int:
        """Bytes of the tier that the graph's buffers span: highest offset + bytes."""
        mask = self.buffer_tier == tier
        return int((self.buffer_offset + self.buffer_bytes)[mask].max(initial=0))

    def touched(self, task: int) -> np.ndarray:
        """Buffers a task reads or writes, each once."""
        return np.unique(np.concatenate((self.reads.row(task), self.writes.row(task))))

    def successors(self) -> list[list[int]]:
        """Per task, the tasks that wait for it."""
        after: list[list[int]] = [[] for _ in range(self.tasks)]
        starts, values = self.deps.starts, self.deps.values.tolist()
        for task in range(self.tasks):
            for dep in values[starts[task] : starts[task + 1]]:
                after[dep].append(task)
        return after

    def check(self) -> None:
        """Raise ValueError when the graph could deadlock or two live buffers overlap.

        Resource order is part of what is checked: a task waits for its dependencies and for
        the task before it at each of its resources.
        """
        before: list[set[int]] = [set(self.deps.row(t).tolist()) for t in range(self.tasks)]
        last: dict[int, int] = {}
        for task in range(self.tasks):
            for resource in self.uses.row(task).tolist():
                if resource in last:
                    before[task].add(last[resource])
                last[resource] = task
        waiting = [len(deps) for deps in before]
        after: list[list[int]] = [[] for _ in range(self.tasks)]
        for task, deps in enumerate(before):
            for dep in deps:
                after[dep].append(task)
        ready = [task for task in range(self.tasks) if not waiting[task]]
        done = 0
        while ready:
            done += 1
            for task in after[ready.pop()]:
                waiting[task] -= 1
                if not waiting[task]:
                    ready.append(task)
        if done != self.tasks:
            stuck = [task for task in range(self.tasks) if waiting[task]][:8]
            raise ValueError(f"the graph has a cycle through tasks {stuck}")
        over = self.amounts > self.capacity[self.uses.values]
        if over.any():
            raise ValueError("a task takes more of a resource than its capacity")
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        first = np.where(self.buffer_persistent, -1, self.buffer_first)
        last = np.where(self.buffer_persistent, self.tasks, self.buffer_last)
        for tier in range(len(self.tiers)):
            members = np.flatnonzero((self.buffer_tier == tier) & (self.buffer_bytes > 0))
            order = members[np.argsort(self.buffer_offset[members], kind="stable")]
            ends = self.buffer_offset[order] + self.buffer_bytes[order]
            for position, buffer in enumerate(order.tolist()):
                stop = np.searchsorted(self.buffer_offset[order], ends[position], side="left")
                others = order[position + 1 : stop]
                clash = (first[others] <= last[buffer]) & (first[buffer] <= last[others])
                if clash.any():
                    other = int(others[clash][0])
                    raise ValueError(f"buffers {buffer} and {other} are live together at one address")
