"""Bytes that a graph's execution moves to and from disk, and over the link to a device."""

from __future__ import annotations

import numpy as np

from packmule.graph.kinds import TaskKind
from packmule.graph.step import StepGraph

_READS = [kind for kind in TaskKind if kind.name.startswith("READ")]
_WRITES = [kind for kind in TaskKind if kind.name.startswith("WRITE")]
SENDS = tuple(kind for kind in TaskKind if kind.name.startswith("SEND"))
RECEIVES = tuple(kind for kind in TaskKind if kind.name.startswith("RECEIVE"))


def is_io(kind: TaskKind) -> bool:
    """Whether a kind of task moves bytes to or from disk."""
    return kind in _READS or kind in _WRITES


def uses_disk(kind: TaskKind) -> bool:
    """Whether a kind of task occupies the disk."""
    return is_io(kind) or kind in (TaskKind.COMMIT, TaskKind.VALIDATE, TaskKind.SNAPSHOT)


def spilled(graph: StepGraph) -> int:
    """Bytes of block inputs that one execution writes."""
    kinds = (TaskKind.WRITE_INPUT, TaskKind.WRITE_ROUTED)
    return int(graph.moved[np.isin(graph.kind, kinds)].sum())


def copied(graph: StepGraph) -> int:
    """Bytes that one execution writes to a snapshot."""
    return int(graph.moved[graph.kind == TaskKind.WRITE_SNAPSHOT].sum())


def traffic(graph: StepGraph) -> tuple[int, int]:
    """(read, written) bytes of one execution."""
    read = graph.moved[np.isin(graph.kind, _READS)].sum()
    return int(read), int(graph.moved[np.isin(graph.kind, _WRITES)].sum())


def link_traffic(graph: StepGraph) -> tuple[int, int]:
    """(sent, received) bytes of one execution between RAM and a device."""
    sent = graph.moved[np.isin(graph.kind, SENDS)].sum()
    return int(sent), int(graph.moved[np.isin(graph.kind, RECEIVES)].sum())


def busy_seconds(graph: StepGraph, seconds: np.ndarray) -> dict[str, float]:
    """Seconds that tasks keep each resource busy.

    Args:
        seconds: float64 [tasks], durations.
    """
    homes = graph.uses.values[graph.uses.starts[:-1]]
    return {name: float(seconds[homes == index].sum()) for index, name in enumerate(graph.resources)}
