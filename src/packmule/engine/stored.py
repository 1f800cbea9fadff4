"""Bodies that move state between the arena and its slots, and the checksums that vouch for it.

A chunk on its way to an update or a cast is verified by that task, and one that an update has changed, and
that is to be stored, is summed by it, by all threads and while it is in their caches. The disk's lane sums
what no such task touches. What a chunk in RAM sums to is known until it changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from packmule.engine.program import Chunk, Task
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import BufferKind


def moving(runtime: Runtime, task: Task) -> list[Chunk]:
    """The task's chunks of every plane (all of the block's where it has no part), of a plane that is laid out
    otherwise than the masters all chunks with their first; or its chunk of the master plane alone."""
    if task.moved is None:
        task.moved = _find(runtime, task)
    return task.moved


def _find(runtime: Runtime, task: Task) -> list[Chunk]:
    model, layout = runtime.model, runtime.store.layout
    chunks, masters = model.chunks(task.block), model.plane_bytes[task.block]
    resident = task.find(BufferKind.STATE)
    place = resident or task.find(BufferKind.STATE_CHUNK)
    if place is None:
        start, size = chunks[task.part]
        alone = task.find(BufferKind.MASTER_CHUNK)
        at = alone.offset if alone else task.get(BufferKind.WEIGHTS).offset + start
        return [Chunk(task.part, runtime.arena.view(at, size), at)]
    parts = task.parts or (range(len(chunks)) if task.part < 0 else (task.part,))
    plane_at, found = place.offset, []
    for plane, total in enumerate(model.plane_sizes[task.block]):
        if total == masters:
            for part in parts:
                start, size = chunks[part]
                at = plane_at + (start if resident else 0)
                found.append(Chunk(layout.index(task.block, plane, part), runtime.arena.view(at, size), at))
        elif parts[0] == 0:
            first = layout.index(task.block, plane, 0)
            for index in range(first, first + layout.pieces(task.block, plane)):
                chunk = layout.chunks(task.block)[index]
                at = plane_at + chunk.start
                found.append(Chunk(index, runtime.arena.view(at, chunk.bytes), at))
        plane_at += total if resident or total != masters else chunks[parts[0]][1]
    return found


def confirm(runtime: Runtime, chunks: Iterable[Chunk]) -> None:
    """Hold chunks that were read and not yet verified against their checksums.

    Raises:
        DamagedFile: names block, plane and chunk.
    """
    for _, view, at in chunks:
        place = runtime.state.unverified.pop(at, None)
        if place is not None:
            found = runtime.kernels.crc32c_wide(view)
            if found != place.checksum:
                raise runtime.store.damage(place, found)


def vouch(runtime: Runtime, block: int, chunks: Iterable[Chunk]) -> None:
    """Take the checksums of chunks that are to be stored."""
    for chunk in chunks:
        runtime.sums[block, chunk.number] = runtime.kernels.crc32c_wide(chunk.view)


def forget(runtime: Runtime, block: int, chunks: Iterable[Chunk]) -> None:
    """Chunks have changed: what they sum to is not known any more."""
    for chunk in chunks:
        runtime.sums.pop((block, chunk.number), None)


def read_state(runtime: Runtime, task: Task) -> None:
    """Some chunks of every plane, or one of the master plane alone, from their slots; the task that takes
    them verifies them."""
    chunks = moving(runtime, task)
    places = runtime.store.read_many(task.block, [chunk.stored for chunk in chunks], verify=False)
    for chunk, place in zip(chunks, places, strict=True):
        runtime.state.unverified[chunk.at] = place


def read_verified(runtime: Runtime, task: Task) -> None:
    """The same, verified at once."""
    chunks = moving(runtime, task)
    places = runtime.store.read_many(task.block, [chunk.stored for chunk in chunks])
    if task.find(BufferKind.STATE) is not None:
        for chunk, place in zip(chunks, places, strict=True):
            runtime.sums[task.block, chunk.number] = place.checksum


def write_state(runtime: Runtime, task: Task) -> None:
    """Some chunks of every plane to the block's slot; the first begins the update, the last ends it. What is
    not known of their sums is taken on the way."""
    store = runtime.writable
    if task.part == 0:
        store.begin(task.block)
    chunks = moving(runtime, task)
    known = [runtime.sums.pop((task.block, chunk.number), None) for chunk in chunks]
    sums = store.write_many(task.block, [chunk.stored for chunk in chunks], known)
    if task.find(BufferKind.STATE) is not None:
        # It stays as it is until it is updated: another store of it need not sum it again.
        for chunk, value in zip(chunks, sums, strict=True):
            runtime.sums[task.block, chunk.number] = value
    if task.parts[-1] == store.layout.pieces(task.block) - 1:
        store.end(task.block)


def write_snapshot(runtime: Runtime, task: Task) -> None:
    """The same chunks of every plane to the snapshot under way. Its checksums are those of the commit."""
    runtime.snapshot.write_many(task.block, [chunk.stored for chunk in moving(runtime, task)])
