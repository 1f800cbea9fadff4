"""GraphBuilder: tasks in program order in, a checked StepGraph with offsets and edges out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from packmule.graph.offsets import assign_offsets, reuse_pairs
from packmule.graph.step import Csr, StepGraph


class GraphBuilder:
    """Collects tasks and buffers; derives dependencies from reads and writes.

    Args:
        resources: name -> capacity.
        tiers: names of the tiers, by index.
        align: every transient buffer's offset and size is a multiple of this many bytes.
    """

    def __init__(self, resources: Mapping[str, int], tiers: Iterable[str], align: int = 1) -> None:
        self._resources = {name: index for index, name in enumerate(resources)}
        self._capacity = list(resources.values())
        self._tiers = tuple(tiers)
        self._align = align
        self._tasks: list[tuple[int, int, int, int, int, float, int, int]] = []
        self._uses: list[list[int]] = []
        self._amounts: list[int] = []
        self._reads: list[list[int]] = []
        self._writes: list[list[int]] = []
        self._deps: list[list[int]] = []
        self._buffers: list[tuple[int, int, int, int, bool, int, int, int, int]] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._writer: list[int] = []  # last task that wrote the buffer
        self._readers: list[list[int]] = []  # readers since then

    def buffer(
        self,
        kind: int,
        tier: int,
        size: int,
        *,
        at: int | None = None,
        rank: int = 0,
        block: int = -1,
        micro: int = -1,
        part: int = -1,
    ) -> int:
        """Declare a buffer of `size` bytes; its index.

        A buffer with `at` is persistent: it lies at that offset before, during and after the
        graph. The others exist from their first to their last task.
        """
        self._buffers.append(
            (kind, tier, size, -1 if at is None else at, at is not None, rank, block, micro, part)
        )
        self._first.append(-1)
        self._last.append(-1)
        self._writer.append(-1)
        self._readers.append([])
        return len(self._buffers) - 1

    def task(
        self,
        kind: int,
        uses: Mapping[str, int],
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        seconds: float = 0.0,
        workspace: int = 0,
        moved: int = 0,
        rank: int = 0,
        block: int = -1,
        micro: int = -1,
        part: int = -1,
    ) -> int:
        """Add the next task in program order; its index.

        Raises:
            ValueError: it reads a transient buffer that nothing has written.
        """
        index = len(self._tasks)
        read_list, write_list = list(dict.fromkeys(reads)), list(dict.fromkeys(writes))
        deps: set[int] = set()
        for buffer in read_list:
            if self._writer[buffer] < 0 and not self._buffers[buffer][4]:
                raise ValueError(f"task {index} reads buffer {buffer}, which nothing has written")
            deps.add(self._writer[buffer])
        for buffer in write_list:
            deps.add(self._writer[buffer])
            deps.update(self._readers[buffer])
        deps.discard(-1)
        for buffer in read_list:
            self._readers[buffer].append(index)
            self._touch(buffer, index)
        for buffer in write_list:
            self._writer[buffer] = index
            self._readers[buffer] = []
            self._touch(buffer, index)
        self._tasks.append((kind, rank, block, micro, part, seconds, workspace, moved))
        self._uses.append([self._resources[name] for name in uses])
        self._amounts.extend(uses.values())
        self._reads.append(read_list)
        self._writes.append(write_list)
        self._deps.append(sorted(deps))
        return index

    def _touch(self, buffer: int, task: int) -> None:
        if self._first[buffer] < 0:
            self._first[buffer] = task
        self._last[buffer] = task

    def build(
        self,
        start: Mapping[int, int] | None = None,
        overlapped: Collection[int] = (),
        alternating: Collection[int] = (),
    ) -> StepGraph:
        """Assign offsets, add the edges of reuse.

        Args:
            start: per tier, the offset below which persistent buffers lie.
            overlapped: kinds of tasks that do not wait for their memory until another resource has ended
                what stands before them: a buffer whose last task is another resource's keeps its bytes
                beside the next such task.
            alternating: kinds of tasks that go on while what the next of their kind needs is made: a buffer
                whose last task is of such a kind keeps its bytes until then.
        """
        columns = np.array([task[:5] for task in self._tasks], np.int64).reshape(-1, 5).T
        buffers = np.array([tuple(map(int, b)) for b in self._buffers], np.int64).reshape(-1, 9).T
        kind, tier, size, offset, persistent = buffers[:5]
        first, last = np.array(self._first, np.int64), np.array(self._last, np.int64)
        offset = offset.copy()
        deps = [set(row) for row in self._deps]
        held = self._held(last, columns[0], alternating)
        until = np.maximum(self._until(last, columns[0], overlapped), held)
        for index in range(len(self._tiers)):
            members = np.flatnonzero((tier == index) & (persistent == 0) & (first >= 0))
            rounded = -(-size[members] // self._align) * self._align
            base = (start or {}).get(index, 0)
            offset[members] = base + assign_offsets(first[members], held[members], rounded, until[members])
            for earlier, later in reuse_pairs(first[members], last[members], offset[members], rounded):
                before, after = int(members[earlier]), int(members[later])
                target = int(first[after])
                deps[target].update(self._readers[before] or [self._writer[before]])
        graph = StepGraph(
            resources=tuple(self._resources),
            capacity=np.array(self._capacity, np.int64),
            kind=columns[0],
            rank=columns[1],
            block=columns[2],
            micro=columns[3],
            part=columns[4],
            seconds=np.array([task[5] for task in self._tasks], np.float64),
            workspace=np.array([task[6] for task in self._tasks], np.int64),
            moved=np.array([task[7] for task in self._tasks], np.int64),
            uses=Csr.of(self._uses),
            amounts=np.array(self._amounts, np.int64),
            reads=Csr.of(self._reads),
            writes=Csr.of(self._writes),
            deps=Csr.of([sorted(row) for row in deps]),
            tiers=self._tiers,
            buffer_kind=kind,
            buffer_tier=tier,
            buffer_bytes=size,
            buffer_offset=np.maximum(offset, 0),
            buffer_first=first,
            buffer_last=last,
            buffer_persistent=persistent.astype(bool),
            buffer_rank=buffers[5],
            buffer_block=buffers[6],
            buffer_micro=buffers[7],
            buffer_part=buffers[8],
        )
        return graph

    def _held(self, last: np.ndarray, kinds: np.ndarray, alternating: Collection[int]) -> np.ndarray:
        """Per buffer, the task until which nothing else gets its bytes."""
        held = last.copy()
        for kind in alternating:
            tasks = np.flatnonzero(kinds == kind)
            mine = np.flatnonzero((last >= 0) & (kinds[last] == kind))
            at = np.searchsorted(tasks, last[mine], side="right")
            found = at < len(tasks)
            held[mine[found]] = tasks[at[found]]
        return held

    def _until(self, last: np.ndarray, kinds: np.ndarray, overlapped: Collection[int]) -> np.ndarray:
        """Per buffer, the task beside which it still keeps its bytes."""
        following = np.flatnonzero(np.isin(kinds, list(overlapped)))
        at = np.searchsorted(following, last, side="right")
        found = at < len(following)
        until = last.copy()
        until[found] = following[at[found]]
        home = np.array([uses[0] for uses in self._uses], np.int64)
        return np.where((last >= 0) & (home[until] != home[last]), until, last)
