"""GraphBuilder: tasks in program order in, a checked StepGraph with offsets and edges out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from packmule.graph.offsets import assign_offsets, reuse_pairs
from packmule.graph.step import Csr, StepGraph

WHOLE = -1
"""In place of a part's number: all of a buffer."""


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
        # By buffer and part of it (or WHOLE): the last task that wrote it, and those that have read it since.
        self._writer: list[dict[int, int]] = []
        self._readers: list[dict[int, list[int]]] = []
        self._openers: list[list[int]] = []  # tasks that wait for no other of the buffer

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
        self._writer.append({})
        self._readers.append({})
        self._openers.append([])
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
        partly: Collection[int] = (),
    ) -> int:
        """Add the next task in program order; its index.

        Args:
            partly: of these buffers it touches only what belongs to its `part`, so that it need not wait for
                tasks that do so with another part.

        Raises:
            ValueError: it reads a transient buffer that nothing has written.
        """
        index = len(self._tasks)
        read_list, write_list = list(dict.fromkeys(reads)), list(dict.fromkeys(writes))
        deps: set[int] = set()
        for buffer in read_list:
            writers = self._written_by(buffer, part if buffer in partly else WHOLE)
            if not writers and not self._buffers[buffer][4]:
                raise ValueError(f"task {index} reads buffer {buffer}, which nothing has written")
            deps.update(writers)
        for buffer in write_list:
            at = part if buffer in partly else WHOLE
            writers = self._written_by(buffer, at)
            if not writers:
                self._openers[buffer].append(index)
            deps.update(writers)
            readers = self._readers[buffer]
            for key in readers if at == WHOLE else (WHOLE, at):
                deps.update(readers.get(key, ()))
        for buffer in read_list:
            at = part if buffer in partly else WHOLE
            self._readers[buffer].setdefault(at, []).append(index)
            self._touch(buffer, index)
        for buffer in write_list:
            at = part if buffer in partly else WHOLE
            if at == WHOLE:
                self._writer[buffer].clear()
                self._readers[buffer].clear()
            self._writer[buffer][at] = index
            self._readers[buffer][at] = []
            self._touch(buffer, index)
        self._tasks.append((kind, rank, block, micro, part, seconds, workspace, moved))
        self._uses.append([self._resources[name] for name in uses])
        self._amounts.extend(uses.values())
        self._reads.append(read_list)
        self._writes.append(write_list)
        self._deps.append(sorted(deps))
        return index

    def _written_by(self, buffer: int, part: int) -> Collection[int]:
        """The tasks that what is in a part of a buffer, or in all of it, comes from."""
        writers = self._writer[buffer]
        if part == WHOLE:
            return writers.values()
        return [writers[key] for key in (part, WHOLE) if key in writers][:1]

    def _ends(self, buffer: int) -> Iterable[int]:
        """The tasks after which nothing more is asked of a buffer."""
        writers, readers = self._writer[buffer], self._readers[buffer]
        for key in {**writers, **readers}:
            yield from readers.get(key) or [writers[key]]

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
                for opener in self._openers[after]:
                    deps[opener].update(self._ends(before))
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
