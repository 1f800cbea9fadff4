"""Visits: a step as fetches, computations and what follows from them, and the order they are emitted in."""

from __future__ import annotations

from dataclasses import dataclass, field

from packmule.graph.emit import Op, Stream, in_order
from packmule.spec.plan import Io, Plan


@dataclass
class Visit:
    """Some micro-batches at one block in one direction.

    Attributes:
        fetch: brings what the computation needs; runs ahead. What it sends to a device stands one visit
            ahead.
        compute: the computation, one op per micro-batch.
        after: what follows from it (updates, stores); may lag behind.
    """

    fetch: Stream = field(default_factory=list)
    compute: list[Op] = field(default_factory=list)
    after: Stream = field(default_factory=list)


def ahead(plan: Plan) -> int:
    """Visits that a fetch runs ahead: one more where what it brings to RAM is then sent to a device."""
    return plan.io.prefetch + (plan.device is not None and plan.io.prefetch > 0)


def arrange(visits: list[Visit], io: Io, prefetch: int | None = None) -> None:
    """Emit visits in program order: fetches `prefetch` visits ahead (by default `io.prefetch`), aftermath one
    visit late, both interleaved with the computation between them.

    While an operation of a visit computes, the disk can do no more than the reads that stand
    before it: `io.read_ahead` chunks of the stream. As many chunks' updates follow the operation
    without waiting."""
    prefetch = io.prefetch if prefetch is None else prefetch
    if prefetch == 0:
        for visit in visits:
            emit(visit.fetch, io)
            for op in [*_sends(visit), *visit.compute]:
                op()
            emit(visit.after, io)
        return
    for visit in visits[:prefetch]:
        emit(visit.fetch, io)
    for visit in visits[:1]:
        for op in _sends(visit):
            op()
    late: Stream = []
    for index, visit in enumerate(visits):
        fetch = visits[index + prefetch].fetch if index + prefetch < len(visits) else []
        lead, units = in_order([*fetch, *late], io.read_ahead)
        following = _sends(visits[index + 1]) if index + 1 < len(visits) else []
        for op in [*following, *lead]:
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


def _sends(visit: Visit) -> list[Op]:
    return [piece.send for piece in visit.fetch if piece.send is not None]


def emit(stream: Stream, io: Io) -> None:
    """Emit a stream with no computation beside it."""
    lead, units = in_order(stream, io.read_ahead)
    for op in [*lead, *units]:
        op()
