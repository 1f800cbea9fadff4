"""What a plan will take: its graphs built and simulated, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from packmule.graph.kinds import COMPUTE, UPDATES, BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.run import SNAPSHOT, SPECULATING, Maker, extents_of, grouped, run_graphs
from packmule.graph.simulate import simulate, times
from packmule.graph.step import StepGraph
from packmule.graph.traffic import busy_seconds, copied, link_traffic, spilled, traffic
from packmule.graph.training import build_step
from packmule.plan.outside import STAGING_BYTES as STAGING_BYTES
from packmule.plan.outside import batch_bytes as batch_bytes
from packmule.plan.outside import device_workspace, held_bytes, outside_bytes
from packmule.plan.situation import Situation
from packmule.spec.plan import PhaseMemory, Plan, Predicted
from packmule.spec.timeline import Timeline

PART_NAMES = {
    BufferKind.STATE: "state",
    BufferKind.STATE_CHUNK: "state in transit",
    BufferKind.MASTER_CHUNK: "state in transit",
    BufferKind.WEIGHTS: "weights",
    BufferKind.GRADIENT: "gradients",
    BufferKind.GRADIENT_CHUNK: "gradients",
    BufferKind.INPUT: "activations",
    BufferKind.SAVED: "activations",
    BufferKind.DY: "activations",
    BufferKind.SCRATCH: "scratch",
    BufferKind.NORMS: "scratch",
    BufferKind.SCALE: "scratch",
    BufferKind.KV: "keys and values",
    BufferKind.LOGITS: "scratch",
    BufferKind.ROUTED: "activations",
    BufferKind.MIXED: "activations",
    BufferKind.DISPATCHED: "activations",
    BufferKind.BALANCE: "scratch",
    BufferKind.SCORES: "scratch",
    BufferKind.GATHERED: "activations",
    BufferKind.WEIGHTS_CHUNK: "weights",
}


_PHASES = {
    "load": "load",
    "step": "step",
    "step, commit": "commit",
    "evaluate": "evaluation",
    "prompt": "sample",
}
"""Graph name -> phase of a run's life."""


def baseline(situation: Situation) -> int:
    """Bytes of the parent and child before a run allocates anything of its own."""
    return situation.hardware.parent_baseline_bytes + situation.hardware.child_baseline_bytes


def graphs(situation: Situation, plan: Plan) -> dict[str, Maker]:
    """Every graph that the run goes through, by name."""
    model = PlannedModel(situation.shape, plan)
    return run_graphs(
        model,
        situation.costs,
        situation.mean_length,
        situation.evaluation_rows,
        situation.sample_tokens,
    )


def peak_parts(graph: StepGraph, timeline: Timeline) -> dict[str, int]:
    """Live arena bytes by kind at the moment most are live."""
    moment = int(np.argmax(timeline.ledger_bytes[Tier.RAM.name.lower()]))
    # A task is in the ledger twice: when it starts and when it has ended.
    seen = np.bincount(timeline.ledger_task[1 : moment + 1], minlength=graph.tasks)
    live = _touched(graph, seen > 0) & _touched(graph, seen < 2)
    live |= set(np.flatnonzero(graph.buffer_persistent).tolist())
    parts: dict[str, int] = {}
    for buffer in sorted(live):
        if graph.buffer_tier[buffer] == Tier.RAM:
            part = PART_NAMES[BufferKind(int(graph.buffer_kind[buffer]))]
            parts[part] = parts.get(part, 0) + int(graph.buffer_bytes[buffer])
    return parts


def _touched(graph: StepGraph, tasks: np.ndarray) -> set[int]:
    """Buffers that any task of a mask (bool [tasks]) touches."""
    return {buffer for task in np.flatnonzero(tasks).tolist() for buffer in graph.touched(task).tolist()}


class Step(NamedTuple):
    """A steady step: seconds, bytes of the process tree, bytes of a device's memory."""

    seconds: float
    ram: int
    device: int


def device_bytes(situation: Situation, graphs: Iterable[StepGraph]) -> int:
    """What graphs hold of a device's memory, torch included."""
    if situation.device is None:
        return 0
    every = list(graphs)
    arena = max(graph.extent(Tier.DEVICE) for graph in every)
    return situation.device.context_bytes + arena + max(map(device_workspace, every))


def fake_bytes(situation: Situation, device: int) -> int:
    """What a device of ordinary memory takes of the RAM."""
    return device if situation.device is not None and situation.device.fake else 0


def step_only(situation: Situation, plan: Plan) -> Step:
    """The quick check of a search."""
    model = PlannedModel(situation.shape, plan)
    # Of groups that take turns, the two whose steps are longest and shortest.
    some = sorted({0, len(model.groups) - 1}) if model.groups else [None]
    pending, seconds, ram, device = plan.update == "on-fetch", 0.0, 0, 0
    build = partial(build_step, model, situation.costs, situation.mean_length)
    for group in some:
        graph = build(pending=pending, commit=plan.speculate, group=group, speculate=plan.speculate)
        # A run holds the objects of this graph, of the one that commits, and for on-fetch of the first
        # step's; of groups' graphs it holds one.
        alike = (graph,) * (1 if model.groups else 3 if pending else 2)
        outside = outside_bytes(situation.shape, plan, alike)
        held = device_bytes(situation, [graph])
        device = max(device, held)
        here = baseline(situation) + graph.extent(Tier.RAM) + outside + fake_bytes(situation, held)
        ram = max(ram, here)
        steady = build(speculate=True) if plan.speculate else graph
        seconds += float(times(steady)[1].max(initial=0.0)) / len(some)
    return Step(seconds, ram, device)


def predict(situation: Situation, plan: Plan) -> Predicted:
    """Simulate every phase of a run under a plan. Where groups take turns, a step is the mean of theirs,
    and its memory that of the largest."""
    makers = graphs(situation, plan)
    groups = len(PlannedModel(situation.shape, plan).groups)
    every = {name: make() for name, make in makers.items() if ", group " not in name}
    extents, counted = [extents_of(every.values())], set(every)
    turns: list[Predicted] = []
    for group in range(groups):
        suffix = grouped("", group)
        found = {name: make for name, make in makers.items() if name.endswith(suffix)}
        # Graphs of groups are not kept, and each takes long to make.
        steps = {name.removesuffix(suffix): make() for name, make in found.items()}
        extents.append(extents_of(steps.values()))
        counted |= set(found)
        lines = {name: simulate(graph) for name, graph in steps.items()}
        turns.append(_times(plan, steps, lines, 0, ()))
        most = every.get("step")
        if most is None or steps["step"].extent(Tier.RAM) > most.extent(Tier.RAM):
            every |= steps
    extents.append(extents_of(make() for name, make in makers.items() if name not in counted))
    arena, disk, slots = (max(sizes[t] for sizes in extents) for t in (Tier.RAM, Tier.DISK, Tier.SLOTS))
    timelines = {name: simulate(graph) for name, graph in every.items()}
    held = held_bytes(situation.shape, plan, every.values())
    outside = outside_bytes(situation.shape, plan, every.values())
    base, device = baseline(situation), device_bytes(situation, every.values())
    fake = fake_bytes(situation, device)
    # The arena is touched once and stays: every phase but the import has all of it resident.
    phases: list[PhaseMemory] = []
    for name in every:
        phase = _PHASES.get(name.split(" ")[0] if name.startswith("evaluate") else name)
        if phase is None or any(known.phase == phase for known in phases):
            continue
        parts = peak_parts(every[name], timelines[name])
        used = sum(parts.values())
        parts = {"baseline": base, **parts, "unused arena": max(0, arena - used)}
        parts |= {"compiled kernels and objects": held, "workspace": outside - held}
        parts |= {"fake device": fake} if fake else {}
        phases.append(_phase(phase, parts, 2 * slots + disk, device))
    loading = next(phase for phase in phases if phase.phase == "load")
    phases.append(loading.model_copy(update={"phase": "resume"}))
    export = {"baseline": base, "unused arena": arena}
    export |= {"compiled kernels and objects": held, "workspace": outside - held}
    export |= {"fake device": fake} if fake else {}
    phases.append(_phase("export", export, 2 * slots + disk + 4 * situation.shape.numel, device))
    whole = _times(plan, every, timelines, base + arena + outside + fake, tuple(phases))
    whole = whole.model_copy(update={"peak_device_bytes": device})
    return _mean(whole, turns) if turns else whole


def _mean(largest: Predicted, turns: list[Predicted]) -> Predicted:
    """Times and traffic of the mean turn; memory of the largest."""
    mean: dict[str, float | int] = {}
    for name, value in largest:
        if isinstance(value, float):
            mean[name] = fmean(getattr(turn, name) for turn in turns)
        elif name.endswith("_per_step") or name == "snapshot_bytes":
            mean[name] = round(fmean(getattr(turn, name) for turn in turns))
    bottleneck = Counter(turn.bottleneck for turn in turns).most_common(1)[0][0]
    return largest.model_copy(update={**mean, "bottleneck": bottleneck})


def _phase(name: str, parts: dict[str, int], disk: int, device: int) -> PhaseMemory:
    ram = sum(parts.values())
    return PhaseMemory(phase=name, ram_bytes=ram, parts=parts, disk_bytes=disk, device_bytes=device)


def _times(
    plan: Plan,
    graphs: dict[str, StepGraph],
    timelines: dict[str, Timeline],
    peak: int,
    phases: tuple[PhaseMemory, ...],
) -> Predicted:
    steady = f"first{SPECULATING}" if plan.speculate else "step"
    graph, timeline = graphs[steady], timelines[steady]
    kinds = [TaskKind(kind) for kind in graph.kind.tolist()]
    seconds = graph.seconds
    busy = busy_seconds(graph, seconds)
    compute = np.array([kind in COMPUTE for kind in kinds])
    busiest = max(busy, key=lambda name: busy[name])
    every = plan.checkpoint.commit_steps
    committing = timelines["step, commit"].seconds
    extra = 0.0 if plan.speculate else (committing - timeline.seconds) / every
    read, written = traffic(graph)
    if plan.placement.state == "ram":
        written += int(graph_state_bytes(graph)) // every
    sent, received = link_traffic(graph)
    kept = f"step, commit{SNAPSHOT}"
    snapshot_seconds, snapshot_bytes = 0.0, 0
    if kept in timelines:
        snapshot_seconds = max(0.0, timelines[kept].seconds - committing)
        snapshot_bytes = copied(graphs[kept])
    return Predicted(
        step_seconds=timeline.seconds + max(0.0, extra),
        clipped_step_seconds=committing if plan.speculate else 0.0,
        compute_seconds=float(seconds[compute].sum()),
        disk_seconds=busy["disk"],
        device_seconds=busy.get("device", 0.0),
        sent_bytes_per_step=sent,
        received_bytes_per_step=received,
        update_seconds=float(seconds[[kind in UPDATES for kind in kinds]].sum()),
        exposed_io_seconds=max(0.0, timeline.seconds - busy.get("device", busy["cores"])),
        bottleneck=busiest,
        peak_ram_bytes=peak,
        phases=phases,
        disk_bytes_written_per_step=written,
        disk_bytes_read_per_step=read,
        disk_bytes_spilled_per_step=spilled(graph),
        snapshot_seconds=snapshot_seconds,
        snapshot_bytes=snapshot_bytes,
    )


def graph_state_bytes(graph: StepGraph) -> int:
    """Bytes of resident state in a graph."""
    mask = (graph.buffer_kind == BufferKind.STATE) & (graph.buffer_tier == Tier.RAM)
    return int(graph.buffer_bytes[mask].sum())
