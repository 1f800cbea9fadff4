"""Which task may start when: the one set of rules that simulation and execution share."""

from __future__ import annotations

from packmule.graph.step import StepGraph


class Schedule:
    """Tracks a graph under way. A task starts when its dependencies have ended, it is first in
    line at each of its resources, and each has room for it; nothing overtakes."""

    def __init__(self, graph: StepGraph) -> None:
        self._uses = [graph.uses.row(t).tolist() for t in range(graph.tasks)]
        starts = graph.uses.starts
        self._amounts = [graph.amounts[starts[t] : starts[t + 1]].tolist() for t in range(graph.tasks)]
        self._successors = graph.successors()
        self._waiting = [len(graph.deps.row(t)) for t in range(graph.tasks)]
        self._free = graph.capacity.tolist()
        self._lines: list[list[int]] = [[] for _ in graph.resources]
        for task, resources in enumerate(self._uses):
            for resource in resources:
                self._lines[resource].append(task)
        self._heads = [0] * len(self._lines)
        self.left = graph.tasks
        """Tasks that have not ended."""

    def start(self) -> list[int]:
        """Every task that may start now, marked as started."""
        started: list[int] = []
        looked = True
        while looked:
            looked = False
            for line, head in enumerate(self._heads):
                if head < len(self._lines[line]) and self._may_start(self._lines[line][head]):
                    task = self._lines[line][head]
                    for resource, amount in zip(self._uses[task], self._amounts[task], strict=True):
                        self._heads[resource] += 1
                        self._free[resource] -= amount
                    started.append(task)
                    looked = True
        return started

    def _may_start(self, task: int) -> bool:
        if self._waiting[task]:
            return False
        for resource, amount in zip(self._uses[task], self._amounts[task], strict=True):
            head = self._heads[resource]
            if self._lines[resource][head] != task or self._free[resource] < amount:
                return False
        return True

    def end(self, task: int) -> None:
        """The task has ended: free its resources and release what waited for it."""
        for resource, amount in zip(self._uses[task], self._amounts[task], strict=True):
            self._free[resource] += amount
        for after in self._successors[task]:
            self._waiting[after] -= 1
        self.left -= 1
