"""Program: a graph with the addresses its bodies need, ready to be executed again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from packmule.engine.executor import execute
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import UPDATES, BufferKind, TaskKind, Tier
from packmule.graph.step import StepGraph
from packmule.spec.timeline import Timeline
from packmule.tiers.ledger import Ledger


@dataclass(frozen=True)
class Range:
    """Where a buffer lies in its tier."""

    offset: int
    bytes: int
    micro: int
    tier: Tier = Tier.RAM


POISON = 0xFF
"""Every byte of what is not written yet, or released, in test mode: NaN in any float type."""


class Chunk(NamedTuple):
    """A chunk of a block's state in the arena: its number in the store's layout, its bytes, their place."""

    number: int
    view: memoryview
    at: int

    @property
    def stored(self) -> tuple[int, memoryview]:
        """As the store takes it."""
        return self.number, self.view


class Task:
    """One task with its buffers by (tier, kind, block).

    Attributes:
        parts: of the chunks of a block's state that it moves, in order.
        home: the resource on whose thread it runs.
        moved: the chunks of state that it touches, once they have been looked up: graphs repeat.
    """

    def __init__(self, graph: StepGraph, index: int) -> None:
        self.kind = TaskKind(int(graph.kind[index]))
        self.block = int(graph.block[index])
        self.micro = int(graph.micro[index])
        self.part = int(graph.part[index])
        self.home = graph.resources[int(graph.uses.row(index)[0])]
        self.parts: list[int] = []
        self.moved: list[Chunk] | None = None
        self._buffers: dict[tuple[int, int, int], Range] = {}
        if self.kind in (TaskKind.COMMIT, TaskKind.SNAPSHOT):
            return
        for buffer in graph.touched(index).tolist():
            key = (
                int(graph.buffer_tier[buffer]),
                int(graph.buffer_kind[buffer]),
                int(graph.buffer_block[buffer]),
            )
            self._buffers[key] = Range(
                int(graph.buffer_offset[buffer]),
                int(graph.buffer_bytes[buffer]),
                int(graph.buffer_micro[buffer]),
                Tier(int(graph.buffer_tier[buffer])),
            )
            if graph.buffer_kind[buffer] in (BufferKind.SLOT, BufferKind.COPY):
                self.parts.append(int(graph.buffer_part[buffer]))
        self.parts.sort()

    def find(self, kind: BufferKind, block: int | None = None, tier: Tier | None = None) -> Range | None:
        """The task's buffer of a kind; `block` is the task's own unless given, `tier` where it computes:
        on the device or in RAM."""
        owner = self.block if block is None else block
        for place in (Tier.DEVICE, Tier.RAM) if tier is None else (tier,):
            found = self._buffers.get((place, kind, owner))
            if found is not None:
                return found
        return None

    def get(self, kind: BufferKind, block: int | None = None, tier: Tier | None = None) -> Range:
        """Like `find`; it must be there."""
        found = self.find(kind, block, tier)
        if found is None:
            raise RuntimeError(f"{self.kind.name} of block {self.block} has no {kind.name}")
        return found


class Program:
    """A graph bound to a runtime.

    Args:
        make: makes the graph, which is made anew after `forget`.
        bodies: kind -> function of (runtime, task).
        poison: fill released buffers in memory with POISON, and check addresses; for tests.
    """

    def __init__(
        self,
        runtime: Runtime,
        make: Callable[[], StepGraph],
        bodies: dict[TaskKind, Callable[[Runtime, Task], None]],
        poison: bool = False,
    ) -> None:
        self.runtime = runtime
        self._make = make
        self._bodies = bodies
        self._poison = poison
        self._graph: StepGraph | None = None
        self._tasks: dict[int, Task] = {}
        self._ledger: Ledger | None = None

    @property
    def graph(self) -> StepGraph:
        """What is executed."""
        if self._graph is None:
            self._graph = self._make()
        return self._graph

    def forget(self) -> None:
        """Let go of the graph until it is needed again."""
        self._graph = self._ledger = None
        self._tasks.clear()

    def run(self, *, stop_after: int | None = None, stopping: Callable[[], bool] | None = None) -> Timeline:
        """Execute the graph once; arguments and errors as in `execute`."""
        ledger = Ledger(self.graph, self._released if self._poison else None, check=self._poison)
        self._ledger = ledger
        return execute(
            self.graph,
            self._body,
            ledger=ledger,
            main="device" if "device" in self.graph.resources else "cores",
            stop_after=stop_after,
            stopping=stopping,
        )

    @property
    def touched(self) -> bool:
        """Whether the execution under way, or the last one, has started to change state. Exact
        where `stopping` asks: the books are kept as tasks start, under the executor's lock."""
        started = [] if self._ledger is None else self._ledger.tasks
        kinds = self.graph.kind[[task for task in started if task >= 0]]
        return any(int(kind) in UPDATES for kind in kinds)

    def _body(self, index: int) -> None:
        task = self._tasks.get(index)
        if task is None:
            task = self._tasks[index] = Task(self.graph, index)
        if task.home == "device":
            with self.runtime.device.computing():
                self._bodies[task.kind](self.runtime, task)
        else:
            self._bodies[task.kind](self.runtime, task)

    def _released(self, buffer: int) -> None:
        offset, size = int(self.graph.buffer_offset[buffer]), int(self.graph.buffer_bytes[buffer])
        memory = self.runtime.memory.get(Tier(int(self.graph.buffer_tier[buffer])))
        if memory is not None:
            memory[offset : offset + size] = POISON
