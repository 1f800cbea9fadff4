"""explain: a plan in words: what is where, what it takes, what was given up and what that costs."""

from __future__ import annotations

from packmule.plan.search import Found
from packmule.plan.situation import Situation
from packmule.spec.plan import PhaseMemory, Plan
from packmule.spec.units import format_bytes, format_seconds

_WEIGHTS = {"state": "made from the state at each use", "ram": "a copy in RAM", "disk": "a copy on disk"}


def decisions(plan: Plan) -> list[tuple[str, str]]:
    """(what, how) of each decision."""
    numerics, place = plan.numerics, plan.placement
    again = sum(plan.recompute)
    layers = len(plan.recompute)
    if again in (0, layers):
        activations = "recomputed in backward" if again else "kept"
    else:
        activations = f"{again} of {layers} layers recomputed, the last {layers - again} kept"
    sizes = "+".join(str(rows) for rows in numerics.micro_rows)
    rows = [
        ("precision", f"{numerics.precision}, {numerics.threads} threads"),
        ("global batch", f"{numerics.rows} rows of {numerics.max_seq_length} tokens, as micro-batches {sizes}"),
        ("state", f"in {place.state.upper() if place.state == 'ram' else 'slots on disk'}"),
        ("weights", _WEIGHTS[place.weights]),
        ("gradients", "one block at a time" if plan.update == "on-backward" else f"all blocks, {place.gradients}"),
        ("activations", f"{activations}; block inputs in {place.inputs}"),
        ("update", plan.update + ("" if numerics.clip is None else f", global norm clipped at {numerics.clip:g}")),
        ("order", "block by block" if plan.order == "breadth" else "micro-batch by micro-batch"),
        ("commit", _commits(plan)),
    ]
    if "disk" in (place.state, place.weights, place.gradients, place.inputs):
        rows.append(("streams", f"{format_bytes(plan.io.chunk_bytes)} chunks, {plan.io.prefetch} blocks ahead"))
    return rows


def _commits(plan: Plan) -> str:
    every = plan.checkpoint.commit_steps
    loss = "nothing beyond the step under way" if every == 1 else f"at most {every} steps"
    if plan.update == "on-fetch":
        loss += " and the one whose update is pending"
    snapshots = plan.checkpoint.snapshot_steps
    kept = f"; a snapshot every {snapshots} steps, {plan.checkpoint.snapshots_kept} kept" if snapshots else ""
    return f"every {'step' if every == 1 else f'{every} steps'} (a crash loses {loss}){kept}"


def phase_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """(phase, RAM, disk, parts) for each phase of the run's life."""
    if plan.predicted is None:
        return []
    return [
        (phase.phase, format_bytes(phase.ram_bytes), format_bytes(phase.disk_bytes), _parts(phase))
        for phase in plan.predicted.phases
    ]


def _parts(phase: PhaseMemory) -> str:
    shown = sorted(((size, name) for name, size in phase.parts.items() if size >= 1 << 20), reverse=True)
    return ", ".join(f"{name} {format_bytes(size)}" for size, name in shown)


def times(plan: Plan) -> list[tuple[str, str]]:
    """(what, how long or how much) of a predicted step."""
    predicted = plan.predicted
    if predicted is None:
        return []
    return [
        ("step", format_seconds(predicted.step_seconds)),
        ("  compute", format_seconds(predicted.compute_seconds)),
        ("  update", format_seconds(predicted.update_seconds)),
        ("  waiting for disk", format_seconds(predicted.exposed_io_seconds)),
        ("disk busy", format_seconds(predicted.disk_seconds)),
        ("bottleneck", predicted.bottleneck),
        ("read per step", format_bytes(predicted.disk_bytes_read_per_step)),
        ("written per step", format_bytes(predicted.disk_bytes_written_per_step)),
        ("peak RAM", f"{format_bytes(predicted.peak_ram_bytes)} of {format_bytes(plan.budget_bytes)}"),
    ]


def given_up(situation: Situation, found: Found) -> list[str]:
    """What the budget costs: the savings this plan makes against one with room for everything."""
    free = found.unbounded
    plan = found.plan
    if free is None or free.predicted is None or plan.predicted is None:
        return []
    differences = [
        f"{name}: {ours} (with room: {theirs})"
        for (name, ours), (_, theirs) in zip(decisions(plan)[1:8], decisions(free)[1:8], strict=True)
        if ours != theirs
    ]
    if not differences:
        return []
    slower = plan.predicted.step_seconds / free.predicted.step_seconds - 1
    cost = (
        f"cost: {slower:+.0%} step time against {format_seconds(free.predicted.step_seconds)} "
        f"with {format_bytes(free.predicted.peak_ram_bytes)}"
    )
    return [*differences, cost]


def explain(situation: Situation, found: Found) -> str:
    """The whole plan as text."""
    plan = found.plan
    lines = [f"plan for {format_bytes(plan.budget_bytes)} of RAM"]
    lines += [f"  {name:<18}{value}" for name, value in decisions(plan)]
    lines.append("predicted step")
    lines += [f"  {name:<18}{value}" for name, value in times(plan)]
    lines.append("memory by phase")
    for phase, ram, disk, parts in phase_rows(plan):
        lines.append(f"  {phase:<12}{ram:>9} RAM {disk:>9} disk   {parts}")
    saved = given_up(situation, found)
    if saved:
        lines.append("given up for the budget")
        lines += [f"  {line}" for line in saved]
    runner = [other for other in found.runners_up if other.predicted is not None][:3]
    if runner:
        lines.append("also fits")
        for other in runner:
            assert other.predicted is not None
            summary = (
                f"{other.update}, state {other.placement.state}, weights {other.placement.weights}, "
                f"{sum(other.recompute)} layers recomputed"
            )
            lines.append(
                f"  {format_seconds(other.predicted.step_seconds):>8}  "
                f"{format_bytes(other.predicted.peak_ram_bytes):>8}  {summary}"
            )
    lines.append(
        f"{found.possible} plans possible, {found.bounded} ruled out by bounds, {found.simulated} simulated"
    )
    return "\n".join(lines) + "\n"
