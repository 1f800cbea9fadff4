"""The executor's ledger equals the simulator's, and its times follow the simulator's rules."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from tests.unit.graph.random_graphs import PARTS, random_graph

from packmule.engine.executor import Stopped, execute
from packmule.graph.builder import GraphBuilder
from packmule.graph.simulate import ledger as replay
from packmule.graph.simulate import simulate
from packmule.tiers.ledger import Ledger


def test_executor_books_equal_simulator_on_1000_random_graphs(seed):
    """Exactly equal bytes at every event; equal times given the measured durations."""
    rng = random.Random(seed)
    noise, total = [], 0.0
    for _ in range(1000):
        graph = random_graph(rng, rng.randint(1, 25), 4e-4)
        books = Ledger(graph, check=True)
        measured = execute(graph, lambda t, g=graph: time.sleep(g.seconds[t]), ledger=books)
        seen: set[int] = set()
        events = []
        for task, when in zip(measured.ledger_task[1:].tolist(), measured.ledger_seconds[1:], strict=True):
            events.append((when, int(task not in seen), task))
            seen.add(task)
        _, _, bytes_by_tier, extent = replay(graph, events)
        for tier in graph.tiers:
            assert np.array_equal(measured.ledger_bytes[tier], bytes_by_tier[tier])
            assert measured.extent[tier] <= extent[tier]
        predicted = simulate(graph, measured.end - measured.start)
        for tier in graph.tiers:
            assert predicted.ledger_bytes[tier][-1] == measured.ledger_bytes[tier][-1]
            assert predicted.extent[tier] == graph.extent(graph.tiers.index(tier))
        noise.append(measured.seconds - predicted.seconds)
        total += predicted.seconds
        # With the tasks' real durations the simulator, which has no overhead, is never later.
        assert (predicted.start <= measured.start + 1e-9).all()
    # A task's bookkeeping costs tens of microseconds; a rule broken anywhere costs far more, in all
    # graphs. The quietest tenth is looked at, since other work may share the machine.
    assert np.quantile(noise, 0.1) < 5e-3
    assert total > 0


def test_no_task_starts_before_what_it_needs(seed):
    rng = random.Random(seed)
    for _ in range(50):
        graph = random_graph(rng, 30, 0.0)
        ended: set[int] = set()
        lock = threading.Lock()
        running = [0] * len(graph.resources)
        order: list[list[int]] = [[] for _ in graph.resources]

        def body(task, graph=graph, ended=ended, lock=lock, running=running, order=order):
            starts = graph.uses.starts[task]
            uses = graph.uses.row(task).tolist()
            with lock:
                assert set(graph.deps.row(task).tolist()) <= ended
                for i, resource in enumerate(uses):
                    running[resource] += int(graph.amounts[starts + i])
                    assert running[resource] <= graph.capacity[resource]
                    order[resource].append(task)
            time.sleep(1e-5)
            with lock:
                ended.add(task)
                for i, resource in enumerate(uses):
                    running[resource] -= int(graph.amounts[starts + i])

        execute(graph, body)
        assert len(ended) == graph.tasks
        for resource, line in enumerate(order):
            if graph.capacity[resource] == 1:
                assert line == sorted(line)


def test_fill_bodies_find_their_own_bytes(seed):
    """Every transient buffer, and every part of it, keeps what its writers put there until its last reader
    has read it."""
    rng = random.Random(seed)
    for _ in range(40):
        partly: list[list[int]] = []
        graph = random_graph(rng, 40, 0.0, partly)
        memory = [np.zeros(graph.extent(tier), np.int64) for tier in range(len(graph.tiers))]
        stamp: dict[tuple[int, int], int] = {}

        def span(buffer, part=slice(None), graph=graph, memory=memory):
            low = int(graph.buffer_offset[buffer])
            return memory[int(graph.buffer_tier[buffer])][low : low + int(graph.buffer_bytes[buffer])][part]

        def touched(task, buffer, graph=graph, partly=partly):
            return [int(graph.part[task])] if buffer in partly[task] else range(PARTS)

        def body(task, graph=graph, stamp=stamp, span=span, touched=touched):
            for buffer in graph.reads.row(task).tolist():
                for part in touched(task, buffer):
                    if (buffer, part) in stamp:
                        assert (span(buffer, slice(part, None, PARTS)) == stamp[buffer, part]).all()
            for buffer in graph.writes.row(task).tolist():
                for part in touched(task, buffer):
                    stamp[buffer, part] = task + 1
                    span(buffer, slice(part, None, PARTS))[:] = task + 1

        def released(buffer, span=span, graph=graph):
            span(buffer)[:] = -1

        execute(graph, body, ledger=Ledger(graph, released, check=True))


def test_stop_after_any_task_starts_nothing_more(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, 20, 1e-4)
    for stop in range(graph.tasks):
        done = []
        with pytest.raises(Stopped):
            execute(graph, lambda t, done=done: done.append(t), stop_after=stop)
        assert stop in done
        home = graph.uses.row(stop)[0]
        assert all(t <= stop for t in done if graph.capacity[home] == 1 and home in graph.uses.row(t))


def test_first_error_of_a_body_is_raised(seed):
    graph = random_graph(random.Random(seed), 20, 1e-4)

    def body(task):
        if task == 7:
            raise KeyError("seven")

    with pytest.raises(KeyError, match="seven"):
        execute(graph, body)


def test_simulated_times_obey_capacity():
    builder = GraphBuilder({"cores": 2, "disk": 1}, ("ram",))
    data = builder.buffer(0, 0, 8)
    builder.task(0, {"disk": 1}, writes=[data], seconds=2.0)
    builder.task(1, {"cores": 1}, seconds=1.0)
    builder.task(1, {"cores": 2}, reads=[data], seconds=1.0)
    builder.task(1, {"cores": 1}, seconds=1.0)
    builder.task(0, {"disk": 1, "cores": 1}, seconds=5.0)
    timeline = simulate(builder.build())
    assert timeline.start.tolist() == [0.0, 0.0, 2.0, 3.0, 3.0]
    assert timeline.seconds == 8.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_memory_that_the_disk_still_empties_is_not_given_to_the_computation(overlapped: bool) -> None:
    """Chunks are read, changed and written; then comes a computation that needs as much memory."""
    compute, other = 7, 1
    builder = GraphBuilder({"cores": 1, "disk": 1}, ("ram",))
    for _ in range(3):
        chunk = builder.buffer(0, 0, 8)
        builder.task(other, {"disk": 1}, writes=[chunk], seconds=1.0)
        builder.task(other, {"cores": 1}, reads=[chunk], writes=[chunk])
        builder.task(other, {"disk": 1}, reads=[chunk], seconds=1.0)
    builder.task(compute, {"cores": 1}, writes=[builder.buffer(0, 0, 8)], seconds=10.0)
    graph = builder.build(overlapped=[compute] if overlapped else [])
    graph.check()
    # The computation starts when the last chunk is changed, not when it is written; chunks themselves
    # still follow each other in the same bytes.
    assert simulate(graph).start[-1] == (5.0 if overlapped else 6.0)
    assert graph.extent(0) == (16 if overlapped else 8)


def test_tasks_on_two_parts_of_a_buffer_do_not_wait_for_each_other():
    builder = GraphBuilder({"cores": 1, "device": 1}, ("ram",))
    buffer = builder.buffer(0, 0, 8)
    for part, resource in enumerate(("cores", "device")):
        builder.task(0, {resource: 1}, writes=[buffer], seconds=2.0, part=part, partly=[buffer])
    builder.task(0, {"device": 1}, reads=[buffer], seconds=1.0)
    builder.task(0, {"cores": 1}, writes=[buffer], seconds=1.0, part=0, partly=[buffer])
    timeline = simulate(builder.build())
    assert timeline.start.tolist() == [0.0, 0.0, 2.0, 3.0]


def test_reading_what_nothing_wrote_is_refused():
    builder = GraphBuilder({"cores": 1}, ("ram",))
    buffer = builder.buffer(0, 0, 8)
    with pytest.raises(ValueError, match="nothing has written"):
        builder.task(0, {"cores": 1}, reads=[buffer])


def test_a_cycle_is_found():
    builder = GraphBuilder({"cores": 1}, ("ram",))
    first = builder.buffer(0, 0, 8)
    builder.task(0, {"cores": 1}, writes=[first])
    builder.task(0, {"cores": 1}, reads=[first])
    graph = builder.build()
    graph.check()
    object.__setattr__(graph, "deps", type(graph.deps).of([[1], [0]]))
    with pytest.raises(ValueError, match="cycle"):
        graph.check()


def test_overlapping_live_buffers_are_found():
    builder = GraphBuilder({"cores": 1}, ("ram",))
    one, two = builder.buffer(0, 0, 8), builder.buffer(0, 0, 8)
    builder.task(0, {"cores": 1}, writes=[one])
    builder.task(0, {"cores": 1}, writes=[two])
    builder.task(0, {"cores": 1}, reads=[one, two])
    graph = builder.build()
    graph.check()
    graph.buffer_offset[:] = 0
    with pytest.raises(ValueError, match="live together"):
        graph.check()
