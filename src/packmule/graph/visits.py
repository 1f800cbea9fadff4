"""Visits: a step as fetches, computations and what follows from them, and the order they are emitted in."""

from __future__ import annotations

from dataclasses import dataclass, field

from packmule.graph.emit import Op, Stream, in_order
from packmule.spec.plan import Io


@dataclass
class Visit:
    """Some micro-batches at one block in one direction.

    Attributes:
        fetch: brings what the computation needs; runs ahead.
        compute: the computation, one op per micro-batch.
        after: what follows from it (updates, stores); may lag behind.
    """

    fetch: Stream = field(default_factory=list)
    compute: list[Op] = field(default_factory=list)
    after: Stream = field(default_factory=list)


def arrange(visits: list[Visit], io: Io) -> None:
    """Emit visits in program order: fetches `io.prefetch` visits ahead, aftermath one visit late,
    both interleaved with the computation between them.

    While an operation of a visit computes, the disk can do no more than the reads that stand
    before it: `io.read_ahead` chunks of the stream. As many chunks' updates follow the operation
    without waiting."""
    prefetch = io.prefetch
    if prefetch == 0:
        for visit in visits:
            emit(visit.fetch, io)
            for op in visit.compute:
                op()
            emit(visit.after, io)
        return
    for visit in visits[:prefetch]:
        emit(visit.fetch, io)
    late: Stream = []
    for index, visit in enumerate(visits):
        ahead = visits[index + prefetch].fetch if index + prefetch < len(visits) else []
        lead, units = in_order([*ahead, *late], io.read_ahead)
        for op in lead:
            op()
        done = 0
        for number, op in enumerate(visit.compute, start=1):
            op()
            until = len(units) * number // len(visit.compute)
            for unit in units[done:until]:
                unit()
            done = until
        late = visit.after
    emit(late, io)


def emit(stream: Stream, io: Io) -> None:
    """Emit a stream with no computation beside it."""
    lead, units = in_order(stream, io.read_ahead)
    for op in [*lead, *units]:
        op()
