"""A device that computes: the bits of the plain loop, the bytes of the formula, and what its faults leave."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from tests.exactness.runs import (
    COSTS,
    Case,
    finish,
    make_case,
    make_plan,
    progress,
    run_steps,
    step_engine,
    tiny_shape,
    watch,
)
from tests.fault.recording_disk import RecordingDisk

from packmule.engine.executor import Stopped
from packmule.engine.program import Program
from packmule.errors import DamagedFile
from packmule.graph.kinds import COMPUTE, UPDATES, BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.run import run_graphs
from packmule.graph.simulate import simulate
from packmule.graph.step import StepGraph
from packmule.graph.traffic import link_traffic
from packmule.kernels.contract import Kernels
from packmule.shapes.layout import PAGE, round_up
from packmule.spec.plan import Placement
from packmule.spec.timeline import Timeline
from packmule.tiers.device import FakeDevice
from packmule.tiers.disk import aligned_buffer

RUN = Path("/run")
STEPS = 3
LAYERS = 3

PLANS: Mapping[str, Mapping[str, object]] = {
    "state in ram": {"update": "on-backward", "clip": None},
    "state in ram, clipped, after backward": {"update": "after-backward"},
    "state on disk, clipped, two backwards": {
        "placement": Placement(state="disk", weights="state", inputs="device"),
        "update": "on-backward",
        "optimizer": {"rule": "lomo"},
    },
    "some weights on the device": {
        "placement": Placement(state="disk", weights="state", inputs="device", device_weights=3),
        "update": "on-fetch",
    },
    "all weights on the device, inputs in ram": {
        "placement": Placement(state="ram", weights="state", inputs="ram", device_weights=99),
        "update": "after-backward",
        "micro_rows": (2, 1),
    },
    "updates shared": {"update": "on-backward", "clip": None, "device_updates": 40},
    "updates shared, after backward, weights in ram": {
        "placement": Placement(state="ram", weights="ram", inputs="device"),
        "update": "after-backward",
        "device_updates": 50,
        "micro_rows": (2, 1),
    },
    "updates shared, from disk, two backwards": {
        "placement": Placement(state="disk", weights="state", inputs="device", device_weights=2),
        "update": "on-backward",
        "device_updates": 70,
    },
    "all updates on the device, gradients on disk": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="ram"),
        "update": "on-fetch",
        "device_updates": 100,
    },
    "inputs on disk": {
        "placement": Placement(state="disk", weights="ram", gradients="disk", inputs="disk"),
        "update": "on-fetch",
        "micro_rows": (2, 1),
    },
}


def planned(tied: bool, name: str, seed: int, kernels: Kernels, **more: object) -> Case:
    placement = Placement(state="ram", weights="state", inputs="device")
    choices = {"placement": placement, "chunk_bytes": 16384, **PLANS[name], **more}
    plan = make_plan(recompute=(True,) * LAYERS, steps=STEPS, device=True, **choices)  # type: ignore[arg-type]
    return make_case(tiny_shape(tied, LAYERS), plan, STEPS, seed, kernels)


def sent_and_received(model: PlannedModel) -> tuple[int, int]:
    """Bytes of a steady step over the link by the formula: each block's weights once for every visit that
    reads them, or once as they are updated; gradients once; spilled inputs there and back. Of chunks that the
    device updates the state there and back; not the gradient, where it is complete there; not the weights,
    where they stay or are about to be used, but back where a copy is kept."""
    plan, place = model.plan, model.plan.placement
    head, twice = len(model.blocks) - 1, model.two_passes
    sent = received = 0
    for block in range(head + 1):
        layer = 0 < block < head
        passes = 1 + layer * (2 if twice else 1) + (block == head and twice)
        if block == 0 and model.shape.tied:
            passes += 2 if twice else 1  # the head's matrix
        stays, there = model.on_device(block), model.updates_there(block)
        sent += model.weight_bytes[block] * (1 if stays else passes)
        received += model.plane_bytes[block]
        moved = sum(model.chunks(block)[part][1] for part in there)
        made = sum(high - low for low, high in (model.weights_span(block, part) for part in there))
        sent, received = sent + len(model.planes) * moved, received + len(model.planes) * moved
        if plan.update == "on-backward":
            received -= moved
        else:
            sent += moved
        if there and (stays or plan.update == "on-fetch"):
            every = [model.weights_span(block, part) for part in range(len(model.chunks(block)))]
            sent += sum(high - low for low, high in every) - model.weight_bytes[block] - made
        received += made if model.place(block).weights != "state" else 0
        near = 2 * block > 2 * head - plan.io.prefetch - 2
        if layer and not near and place.inputs != "device":
            spilled = sum(model.input_bytes(tokens) for tokens in plan.numerics.micro_tokens)
            sent, received = sent + spilled * (2 if twice else 1), received + spilled
    return sent, received


@pytest.mark.parametrize(("name", "tied"), tuple(zip(PLANS, cycle((True, False)), strict=False)))
def test_a_run_has_the_bits_of_the_plain_loop_and_moves_what_the_formula_says(
    name: str, tied: bool, seed: int, kernels: Kernels
) -> None:
    case, disk, device = planned(tied, name, seed, kernels), RecordingDisk(), FakeDevice()
    case.start(RUN, kernels, disk)
    engine, step = case.open(RUN, kernels, disk, device=device)
    trace = [step_engine(engine, case.data, 0)]
    before = device.sent, device.received
    trace.append(step_engine(engine, case.data, 1))
    moved = device.sent - before[0], device.received - before[1]
    assert moved == sent_and_received(engine.model)
    assert moved == link_traffic(engine.programs["step, commit"].graph)
    trace += run_steps(engine, case.data, 2, STEPS)
    engine.close()
    assert (step, trace) == (0, case.expected.trace)
    assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])


@pytest.mark.parametrize("name", PLANS)
def test_what_is_computed_lies_on_the_device_and_all_else_does_not(
    name: str, seed: int, kernels: Kernels
) -> None:
    case = planned(True, name, seed, kernels)
    model = PlannedModel(case.shape, case.plan)
    for graph_name, make in run_graphs(model, COSTS, 8.0, (3,), 16).items():
        graph = make()
        graph.check()
        for task in range(graph.tasks):
            kind, home = TaskKind(int(graph.kind[task])), graph.resources[int(graph.uses.row(task)[0])]
            tiers = {Tier(int(graph.buffer_tier[buffer])) for buffer in graph.touched(task).tolist()}
            if kind in COMPUTE:
                assert (home, tiers) == ("device", {Tier.DEVICE}), (graph_name, kind.name)
            elif home in ("h2d", "d2h"):
                assert tiers == {Tier.RAM, Tier.DEVICE}, (graph_name, kind.name)
            elif kind in UPDATES and home == "device":
                far = {Tier.DEVICE, *(Tier.RAM for b in graph.touched(task) if is_scale(graph, b))}
                assert tiers == far, (graph_name, kind.name)
            elif kind != TaskKind.NORM:
                assert Tier.DEVICE not in tiers, (graph_name, kind.name)


def is_scale(graph: StepGraph, buffer: int) -> bool:
    return bool(graph.buffer_kind[buffer] == BufferKind.SCALE)


class BreakingDevice(FakeDevice):
    """A device whose link breaks at its n-th transfer."""

    def __init__(self, transfers: int) -> None:
        super().__init__()
        self.left = transfers

    def send(self, source: memoryview, offset: int) -> None:
        self._count()
        super().send(source, offset)

    def receive(self, target: memoryview, offset: int) -> None:
        self._count()
        super().receive(target, offset)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("the link is broken")


BREAKING = (
    "state in ram",
    "some weights on the device",
    "inputs on disk",
    "updates shared",
    "updates shared, from disk, two backwards",
)


@pytest.mark.parametrize("name", BREAKING)
def test_a_link_that_breaks_costs_no_more_than_the_steps_since_the_commit(
    name: str, seed: int, kernels: Kernels
) -> None:
    case = planned(False, name, seed, kernels)
    for transfers in (0, 9, 26):
        disk = RecordingDisk()
        case.start(RUN, kernels, disk)
        with pytest.raises(OSError, match="the link is broken"):
            engine, _ = case.open(RUN, kernels, disk, device=BreakingDevice(transfers))
            for number in range(STEPS):
                step_engine(engine, case.data, number)
        step, trace = finish(case, RUN, kernels, disk)
        assert trace == case.expected.trace[step:]
        assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])


def busy(graph: StepGraph, start: np.ndarray, end: np.ndarray, resource: str) -> list[tuple[float, float]]:
    home = graph.resources.index(resource)
    tasks = [task for task in range(graph.tasks) if int(graph.uses.row(task)[0]) == home]
    return [(float(start[task]), float(end[task])) for task in tasks]


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def test_updates_and_both_directions_of_the_link_go_on_beside_the_computation() -> None:
    """Simulated, with tasks that all take as long."""
    placement, layers = Placement(state="ram", weights="state", inputs="device"), 8
    plan = make_plan(
        placement=placement, update="on-backward", clip=None, recompute=(True,) * layers, device=True
    )
    graph = run_graphs(PlannedModel(tiny_shape(False, layers), plan), COSTS, 8.0, (), 0)["step"]()
    even = simulate(graph, np.ones(graph.tasks))
    compute = busy(graph, even.start, even.end, "device")
    for resource in ("cores", "h2d", "d2h"):
        theirs = busy(graph, even.start, even.end, resource)
        hidden, whole = overlap(theirs, compute), sum(end - start for start, end in theirs)
        assert hidden >= 0.7 * whole, resource
    assert even.seconds <= 1.2 * sum(end - start for start, end in compute)


class WaitingDevice(FakeDevice):
    """A device whose n-th computation does not end before something has been received from it."""

    def __init__(self, computation: int) -> None:
        super().__init__()
        self.left, self.arrived = computation, threading.Event()

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield
        self.left -= 1
        if not self.left:
            assert self.arrived.wait(60), "nothing was received beside the computation"

    def receive(self, target: memoryview, offset: int) -> None:
        super().receive(target, offset)
        self.arrived.set()


def test_a_gradient_is_received_while_the_next_block_computes(seed: int, kernels: Kernels) -> None:
    case, disk = planned(False, "state in ram", seed, kernels), RecordingDisk()
    case.start(RUN, kernels, disk)
    forward, head = LAYERS + 1, 2  # with its norm
    engine, _ = case.open(RUN, kernels, disk, device=WaitingDevice(forward + head + 1))
    assert run_steps(engine, case.data, 0, 1) == case.expected.trace[:1]
    engine.close()


def test_device_memory_shrinks_with_what_is_spilled_and_streamed() -> None:
    layers = 16

    def model(placement: Placement) -> PlannedModel:
        recompute = (True,) * layers
        plan = make_plan(micro_rows=(8,), placement=placement, recompute=recompute, device=True)
        return PlannedModel(tiny_shape(False, layers), plan)

    def extent(placement: Placement) -> int:
        return run_graphs(model(placement), COSTS, 8.0, (), 0)["step"]().extent(Tier.DEVICE)

    streamed, spilled, resident = (
        Placement(state="ram", weights="state", inputs="device"),
        Placement(state="ram", weights="state", inputs="ram"),
        Placement(state="ram", weights="state", inputs="device", device_weights=99),
    )
    weights = sum(round_up(size, PAGE) for size in model(resident).weight_bytes)
    assert extent(spilled) < extent(streamed) < extent(resident) <= extent(streamed) + weights


SHARED: Mapping[str, Mapping[str, object]] = {
    "state in ram": {"update": "on-backward", "clip": None, "commit_steps": 2},
    "state on disk": {
        "placement": Placement(state="disk", weights="ram", inputs="device", kept_state=1),
        "update": "after-backward",
        "snapshot_steps": 2,
    },
    "speculating": {
        "placement": Placement(state="disk", weights="state", inputs="device", device_weights=2),
        "update": "on-fetch",
        "speculate": True,
    },
}


@pytest.mark.parametrize("name", SHARED)
def test_a_stop_at_any_task_of_shared_updates_leaves_a_whole_step(
    name: str, seed: int, kernels: Kernels
) -> None:
    placement = Placement(state="ram", weights="state", inputs="device")
    choices = {"placement": placement, "chunk_bytes": 4096, **SHARED[name]}
    recompute = (True,) * LAYERS
    plan = make_plan(recompute=recompute, steps=STEPS, device=True, device_updates=60, **choices)  # type: ignore[arg-type]
    case = make_case(tiny_shape(False, LAYERS), plan, STEPS, seed, kernels)
    rng, fresh = random.Random(seed), RecordingDisk()
    case.start(RUN, kernels, fresh)
    for _ in range(4):
        disk, stop = RecordingDisk(deepcopy(fresh.root)), rng.randrange(STEPS)
        engine, _ = case.open(RUN, kernels, disk)
        runs = iter(range(-1, 99))

        def cut(name: str, program: Program, arguments: dict) -> Timeline:
            if next(runs) == stop - 1:  # noqa: B023
                arguments["stop_after"] = rng.randrange(program.graph.tasks - 1)
            return program.run(**arguments)

        watch(engine, cut)
        with pytest.raises(Stopped):
            for number in range(STEPS):
                engine.expects_clip = rng.random() < 0.3
                step_engine(engine, case.data, number)
            engine.settle(progress(plan, STEPS))
        engine.close()
        step, image = case.state(RUN, kernels, disk)
        assert image == case.expected.images[step] and step >= stop - plan.checkpoint.commit_steps
        resumed, trace = finish(case, RUN, kernels, disk)
        assert (resumed, trace) == (step, case.expected.trace[step:])
        assert case.state(RUN, kernels, disk) == (STEPS, case.expected.images[-1])


def test_a_chunk_is_verified_before_the_device_updates_it(seed: int, kernels: Kernels) -> None:
    rng, disk = random.Random(seed), RecordingDisk()
    case = planned(False, "updates shared, from disk, two backwards", seed, kernels, device_updates=100)
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    step_engine(engine, case.data, 0)
    store = engine.runtime.writable
    block = rng.randrange(len(store.layout.blocks))
    index = rng.randrange(len(store.layout.chunks(block)))
    head = store.head
    assert head is not None
    at = store.layout.chunk_offset(block, head.blocks[block].slot, index)
    place = at + rng.randrange(store.layout.chunks(block)[index].bytes)
    state = RUN / "state.bin"
    handle = disk.open(state, write=True)
    page = aligned_buffer(PAGE)
    disk.read_into(handle, page, place // PAGE * PAGE)
    page[place % PAGE] ^= 1 << rng.randrange(8)
    disk.write(handle, page, place // PAGE * PAGE)
    disk.close(handle)
    with pytest.raises(DamagedFile, match=f"block {store.layout.blocks[block].name}, plane .* is damaged"):
        step_engine(engine, case.data, 1)
    engine.close()
