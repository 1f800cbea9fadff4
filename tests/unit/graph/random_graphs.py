"""Random well-formed graphs for the tests of simulate and execute."""

from __future__ import annotations

import random

from packmule.graph.builder import GraphBuilder
from packmule.graph.step import StepGraph

PARTS = 3
"""Of a buffer, that tasks may touch alone."""


def random_graph(
    rng: random.Random, tasks: int, most_seconds: float, record: list[list[int]] | None = None
) -> StepGraph:
    """Some resources, some buffers in two tiers, tasks that read what was written before.

    Args:
        record: per task, gets the buffers of which it touches its own part alone.
    """
    resources = {f"r{i}": rng.choice((1, 1, 2, 3)) for i in range(rng.randint(1, 4))}
    builder = GraphBuilder(resources, ("ram", "disk"), align=rng.choice((1, 64)))
    base = [0, 0]
    written = []
    parts: dict[int, set[int]] = {}  # that have been written of a transient buffer
    for _ in range(rng.randint(0, 3)):
        tier, size = rng.randint(0, 1), rng.randint(0, 500)
        written.append(builder.buffer(0, tier, size, at=base[tier]))
        base[tier] += -(-size // 64) * 64
    for index in range(tasks):
        names = rng.sample(sorted(resources), rng.randint(1, min(2, len(resources))))
        uses = {name: rng.randint(1, resources[name]) for name in names}
        reads = rng.sample(written, min(len(written), rng.randint(0, 3)))
        writes = [
            builder.buffer(1, rng.randint(0, 1), rng.randint(0, 1000)) for _ in range(rng.randint(0, 2))
        ]
        writes += rng.sample(reads, min(len(reads), rng.randint(0, 1)))
        part = rng.randrange(PARTS)
        may = [
            buffer for buffer in {*reads, *writes} if buffer not in reads or part in parts.get(buffer, {part})
        ]
        partly = rng.sample(may, rng.randint(0, len(may)))
        for buffer in writes:
            parts.setdefault(buffer, set()).update([part] if buffer in partly else range(PARTS))
        choices = {"seconds": rng.random() * most_seconds, "part": part, "partly": partly}
        builder.task(index % 5, uses, reads=reads, writes=writes, **choices)
        if record is not None:
            record.append(partly)
        written = (written + writes)[-12:]
    overlapped = rng.sample(range(5), rng.randint(0, 5))
    graph = builder.build(dict(enumerate(base)), overlapped)
    graph.check()
    return graph
