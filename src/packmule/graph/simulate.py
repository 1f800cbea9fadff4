"""simulate: run a StepGraph on a clock of its own, from predicted seconds to a Timeline."""

from __future__ import annotations

import heapq

import numpy as np

from packmule.graph.schedule import Schedule
from packmule.graph.step import StepGraph
from packmule.spec.timeline import Timeline


def simulate(graph: StepGraph, seconds: np.ndarray | None = None) -> Timeline:
    """Predict when each task runs and which bytes are live.

    Args:
        graph: what to run.
        seconds: float64 [tasks], durations; the graph's own predictions by default.
    """
    start, end, events = times(graph, seconds)
    return Timeline(start, end, *ledger(graph, events))


def times(
    graph: StepGraph, seconds: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, list[tuple[float, int, int]]]:
    """(start, end, events) of `simulate` without its ledger."""
    durations = (graph.seconds if seconds is None else seconds).tolist()
    schedule = Schedule(graph)
    start, end = np.zeros(graph.tasks), np.zeros(graph.tasks)
    events: list[tuple[float, int, int]] = []  # (time, 0 for an end | 1 for a start, task)
    running: list[tuple[float, int]] = []
    now = 0.0
    while schedule.left:
        for task in schedule.start():
            start[task] = now
            end[task] = now + durations[task]
            events.append((now, 1, task))
            heapq.heappush(running, (end[task], task))
        if not running:
            raise ValueError("the graph cannot go on: tasks wait for each other")
        now, task = heapq.heappop(running)
        events.append((now, 0, task))
        schedule.end(task)
    return start, end, events


def ledger(
    graph: StepGraph, events: list[tuple[float, int, int]]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], dict[str, int]]:
    """Live bytes per tier after each start (claims) and end (releases), in event order.

    A transient buffer is live from the start of its first task to the end of the last of its
    tasks to end; a persistent one always.
    """
    touched = [graph.touched(t).tolist() for t in range(graph.tasks)]
    users = np.zeros(graph.buffers, np.int64)
    for row in touched:
        users[row] += 1
    left = users.tolist()
    tier = graph.buffer_tier.tolist()
    size = graph.buffer_bytes.tolist()
    persistent = graph.buffer_persistent.tolist()
    claimed = list(persistent)
    live = [0] * len(graph.tiers)
    for buffer in range(graph.buffers):
        if persistent[buffer]:
            live[tier[buffer]] += size[buffer]
    times, tasks, rows = [0.0], [-1], [list(live)]
    for time, is_start, task in events:
        for buffer in touched[task]:
            if persistent[buffer]:
                continue
            if is_start and not claimed[buffer]:
                claimed[buffer] = True
                live[tier[buffer]] += size[buffer]
            elif not is_start:
                left[buffer] -= 1
                if not left[buffer]:
                    live[tier[buffer]] -= size[buffer]
        times.append(time)
        tasks.append(task)
        rows.append(list(live))
    table = np.array(rows, np.int64).reshape(-1, len(graph.tiers))
    by_tier = {name: table[:, index] for index, name in enumerate(graph.tiers)}
    extents = {name: graph.extent(index) for index, name in enumerate(graph.tiers)}
    return np.array(times), np.array(tasks, np.int64), by_tier, extents
