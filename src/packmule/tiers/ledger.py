"""Ledger: what is live in each tier while a graph executes, checked as it happens."""

from __future__ import annotations

from collections.abc import Callable

from packmule.graph.step import StepGraph


class Ledger:
    """Claims a buffer when its first task starts, releases it when its last one has ended.

    Not thread-safe; the executor calls it under its lock.

    Args:
        graph: the graph that will run.
        released: called with a buffer's index when its life ends, before any other task can
            reuse its address.
        check: also compare addresses, so that claiming bytes in use raises (slow; for tests).
    """

    def __init__(
        self, graph: StepGraph, released: Callable[[int], None] | None = None, check: bool = False
    ) -> None:
        self._check = check
        self._released = released
        self._touched = [graph.touched(t).tolist() for t in range(graph.tasks)]
        self._tier, self._size = graph.buffer_tier.tolist(), graph.buffer_bytes.tolist()
        self._offset, self._persistent = graph.buffer_offset.tolist(), graph.buffer_persistent.tolist()
        self._left = [0] * graph.buffers
        for row in self._touched:
            for buffer in row:
                self._left[buffer] += 1
        self._live: list[dict[int, int]] = [{} for _ in graph.tiers]  # buffer -> bytes
        self._bytes = [0] * len(graph.tiers)
        self.extent = [0] * len(graph.tiers)
        self.tasks: list[int] = []
        self.rows: list[tuple[int, ...]] = []
        for buffer in range(graph.buffers):
            if self._persistent[buffer]:
                self._claim(buffer)
        self._note(-1)

    def start(self, task: int) -> None:
        """The task starts: claim what it touches first."""
        for buffer in self._touched[task]:
            tier = self._tier[buffer]
            if buffer not in self._live[tier]:
                self._claim(buffer)
        self._note(task)

    def end(self, task: int) -> None:
        """The task has ended: release what nothing needs any more."""
        for buffer in self._touched[task]:
            self._left[buffer] -= 1
            if not self._left[buffer] and not self._persistent[buffer]:
                tier = self._tier[buffer]
                self._bytes[tier] -= self._live[tier].pop(buffer)
                if self._released is not None:
                    self._released(buffer)
        self._note(task)

    def _claim(self, buffer: int) -> None:
        tier, size, low = self._tier[buffer], self._size[buffer], self._offset[buffer]
        if self._check:
            self._compare(buffer, tier, low, low + size)
        self._live[tier][buffer] = size
        self._bytes[tier] += size
        self.extent[tier] = max(self.extent[tier], low + size)

    def _compare(self, buffer: int, tier: int, low: int, high: int) -> None:
        for other, length in self._live[tier].items():
            begin = self._offset[other]
            if low < high and length and low < begin + length and begin < high:
                raise RuntimeError(f"buffer {buffer} claims bytes that buffer {other} still holds")

    def _note(self, task: int) -> None:
        self.tasks.append(task)
        self.rows.append(tuple(self._bytes))
