"""explain: a plan in words: what is where, what it takes, what was given up and what that costs."""

from __future__ import annotations

from packmule.graph.model import PlannedModel
from packmule.plan.bounds import Sizes
from packmule.plan.search import Found
from packmule.plan.situation import Situation
from packmule.plan.table import Table, plain
from packmule.plan.wear import wear
from packmule.shapes.bodies import dtypes
from packmule.shapes.groups import groups_of
from packmule.shapes.module import ModuleShape, Shape
from packmule.spec.plan import Numerics, PhaseMemory, Plan, Predicted
from packmule.spec.units import format_bytes, format_seconds, format_share

_BOTTLENECK = {"cores": "compute", "device": "compute", "h2d": "link", "d2h": "link"}

_KEPT = {
    "adamw": "master weights and AdamW moments",
    "lomo": "master weights; LOMO keeps nothing else",
    "adalomo": "master weights and factors of the second moment",
}
"""Update rule -> what its state is."""

_COLUMNS = {
    "baseline": "Python",
    "state": "state",
    "state in transit": "state",
    "weights": "weights",
    "gradients": "grads",
    "activations": "activ.",
    "unused arena": "idle",
}
"""A part of a phase's memory -> its column; the rest is under "other"."""

_ORDER = ("Python", "state", "weights", "grads", "activ.", "other", "idle")

_LOST = 0.005
"""A plan that is slower by less than this share counts as equally fast."""


def decisions(shape: Shape, plan: Plan) -> list[tuple[str, str]]:
    """(what, how) of each decision: what is computed, what lies where, when it is written."""
    numerics, place = plan.numerics, plan.placement
    sizes = Sizes.of(shape, numerics)
    model, planes = PlannedModel(shape, plan), sum(sizes.planes)
    weights = sum(size for block, size in enumerate(sizes.weights) if not model.on_device(block))
    state = f"{format_bytes(sum(sizes.state))} "
    state += "in RAM" if place.state == "ram" else "on disk, streamed block by block"
    state += _kept(place.kept_state, "that are not read")
    sources = {
        "state": "made from the state at each use" if place.state == "disk" else "made from the state in RAM",
        "ram": f"{format_bytes(weights)} in RAM, a copy",
        "disk": f"{format_bytes(weights)} on disk, a copy streamed block by block",
    }
    groups = groups_of(shape.blocks(), numerics.turns) if numerics.turns else ()
    if groups and plan.update != "on-backward":
        most = max(sum(sizes.planes[block] for block in group) for group in groups)
        gradients = f"of one group at a time, at most {format_bytes(most)} in RAM"
    elif plan.update == "on-backward":
        gradients = f"one block at a time, at most {format_bytes(max(sizes.planes))} in RAM"
        if model.halved(0):
            gradients += "; the head's of the vocabulary on disk until the embedding adds its own"
    else:
        gradients = f"{format_bytes(planes)} {_where(place.gradients)}"
    rows = [
        (
            "precision",
            f"{numerics.precision}{_products(numerics)}, {_count(numerics.threads, 'thread')}, "
            f"{numerics.kernels} kernels",
        ),
        (
            "global batch",
            f"{_rows(shape, numerics)}{_micro(plan)}",
        ),
        ("state", f"{state} ({_KEPT[numerics.optimizer.rule]})"),
        *_vocabulary(shape, numerics),
        *_device(shape, plan, sizes),
        ("weights", sources[place.weights] + _kept(place.kept_weights, "too")),
        ("gradients", gradients),
        ("activations", _activations(plan)),
        ("block inputs", f"{format_bytes(_input_bytes(shape, plan))} {_where(place.inputs)}"),
        ("update", _update(plan)),
        *_turns(numerics, groups, sizes),
        ("commit", _commits(plan)),
    ]
    if "disk" in (place.state, place.weights, place.gradients, place.inputs):
        rows.append(
            (
                "streams",
                f"chunks of {format_bytes(plan.io.chunk_bytes)}, {_count(plan.io.prefetch, 'block')} ahead, "
                f"{_count(plan.io.read_ahead, 'chunk')} read ahead",
            )
        )
    return rows


def _device(shape: Shape, plan: Plan, sizes: Sizes) -> list[tuple[str, str]]:
    """What computes, where that is not the cores, and which weights stay there."""
    if plan.device is None:
        return []
    model = PlannedModel(shape, plan)
    stay = [size for block, size in enumerate(sizes.weights) if model.on_device(block)]
    text = f"{plan.device.name} computes, in {format_bytes(plan.device.memory_bytes)}; "
    share = plan.device_updates
    text += f"it updates {share} % of the state, the cores the rest; " if share else "the cores update; "
    if not stay:
        return [("device", text + "weights are sent for each use")]
    text += f"weights of {_count(len(stay), 'block')} ({format_bytes(sum(stay))}) stay there"
    return [("device", text + ("" if len(stay) == len(sizes.weights) else ", others are sent for each use"))]


def _vocabulary(shape: Shape, numerics: Numerics) -> list[tuple[str, str]]:
    """How it is cut, where it is."""
    parts = numerics.vocabulary_parts
    if isinstance(shape, ModuleShape) or parts == 1:
        return []
    planes = Sizes.of(shape, numerics).planes
    most = max(planes[block.index] for block in shape.cut(parts).blocks() if block.tokens)
    how = f"in {parts} parts of at most {format_bytes(most)}, so that it need not fit at once"
    return [("vocabulary", f"{how} (the head computes its logits twice)")]


def _turns(numerics: Numerics, groups: tuple[tuple[int, ...], ...], sizes: Sizes) -> list[tuple[str, str]]:
    """Who is trained when, where groups of blocks take turns."""
    turns = numerics.turns
    if turns is None:
        return []
    most = max(sum(sizes.state[block] for block in group) for group in groups)
    text = f"{turns.method}: {len(groups)} groups, {_count(turns.steps, 'step')} each, {turns.order}"
    return [("turns", f"{text}; a group's state is at most {format_bytes(most)}")]


def _rows(shape: Shape, numerics: Numerics) -> str:
    if isinstance(shape, ModuleShape):
        return _count(numerics.rows, "sample")
    return f"{_count(numerics.rows, 'row')} of at most {numerics.max_seq_length} tokens"


def _where(tier: str) -> str:
    return {"ram": "in RAM", "disk": "on disk", "device": "on the device"}[tier]


def _kept(blocks: int, how: str) -> str:
    return f", but for {_count(blocks, 'block')} kept in RAM {how}" if blocks else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _micro(plan: Plan) -> str:
    sizes = plan.numerics.micro_rows
    if len(sizes) == 1:
        return ", all at once"
    cut = "+".join(str(rows) for rows in sizes)
    order = "each block runs all of them" if plan.order == "breadth" else "one after the other"
    return f", in micro-batches {cut} ({order})"


def _products(numerics: Numerics) -> str:
    return f" multiplied in {numerics.products}" if numerics.products else ""


def _activations(plan: Plan) -> str:
    again, layers = sum(plan.recompute), len(plan.recompute)
    if again == 0:
        return f"of all {layers} layers kept in RAM"
    if again == layers:
        return f"of all {layers} layers computed again in backward"
    return f"of the last {layers - again} layers kept in RAM, of {again} computed again in backward"


def _input_bytes(shape: Shape, plan: Plan) -> int:
    tokens = plan.numerics.micro_tokens
    held = sum(tokens) if plan.order == "breadth" else max(tokens)
    return shape.stream_bytes(held, dtypes(plan.numerics)) * shape.layers


def _update(plan: Plan) -> str:
    when = {
        "after-backward": "after backward",
        "on-backward": "of each block as soon as its gradient is complete",
        "on-fetch": "of each block when the next step fetches it",
    }[plan.update]
    clip = plan.numerics.clip
    if clip is None:
        return f"{plan.update}: {when}"
    if plan.speculate:
        when = (
            "of each block as soon as its gradient is complete, taken back and done at the next fetch "
            "where the gradient turns out to be clipped"
        )
    twice = ", known from a backward of its own before" if plan.update == "on-backward" else ""
    return f"{plan.update}: {when}; global norm clipped at {clip:g}{twice}"


def _clipped(predicted: Predicted) -> str:
    if not predicted.clipped_step_seconds:
        return ""
    return f"; {format_seconds(predicted.clipped_step_seconds)} while gradients are clipped"


def _commits(plan: Plan) -> str:
    every = plan.checkpoint.commit_steps
    # Until the next step has stored or applied what is left of a step, it goes with the one under way.
    steps = every - 1 + (2 if plan.commits_late else 1)
    lost = "the step under way" if steps == 1 else f"{steps} steps, the one under way included"
    snapshots = plan.checkpoint.snapshot_steps
    kept = ""
    if snapshots:
        kept = f"; a full copy every {_count(snapshots, 'step')}, {plan.checkpoint.snapshots_kept} kept"
    return f"every {'step' if every == 1 else f'{every} steps'}; a crash loses at most {lost}{kept}"


def _phase_row(phase: PhaseMemory) -> dict[str, int]:
    columns = dict.fromkeys(_ORDER, 0)
    for name, size in phase.parts.items():
        columns[_COLUMNS.get(name, "other")] += size
    return columns


def phases(plan: Plan) -> Table:
    """Bytes per tier in each phase of the run's life, and what they hold."""
    if plan.predicted is None:
        return Table("memory by phase")
    found = [(phase, _phase_row(phase)) for phase in plan.predicted.phases]
    used = [name for name in _ORDER if any(columns[name] for _, columns in found)]
    rows = tuple(
        (
            phase.phase,
            _megabytes(phase.ram_bytes),
            *(_megabytes(columns[name]) for name in used),
            _megabytes(phase.disk_bytes),
            *([_megabytes(phase.device_bytes)] if plan.device else []),
        )
        for phase, columns in found
    )
    header = ("", "RAM", *used, "disk", *(["device"] if plan.device else []))
    notes = ["RAM: of all processes together; Python: interpreters, torch, tokenizer, before any work"]
    if "idle" in used:
        notes.append("idle: what a phase leaves unused of the one allocation that all phases share")
    return Table("memory by phase, MB", rows, header, frozenset(range(1, len(header))), tuple(notes))


def _megabytes(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 1e6:,.0f}" if size >= 10e6 else f"{size / 1e6:.1f}"


def times(situation: Situation, plan: Plan, steps: int | None = None) -> list[tuple[str, str]]:
    """(what, how long or how much) of a predicted step.

    Args:
        steps: left to run, where that is known.
    """
    predicted = plan.predicted
    if predicted is None:
        return []
    waits = predicted.exposed_io_seconds
    compute, update = format_seconds(predicted.compute_seconds), format_seconds(predicted.update_seconds)
    rest = f"{compute} compute, {update} update"
    rest += f", {format_seconds(waits)} waiting for {_waits(plan)}" if waits >= 1e-6 else ""
    traffic = (predicted.disk_bytes_read_per_step, predicted.disk_bytes_written_per_step)
    rows = [
        ("step", f"{format_seconds(predicted.step_seconds)}: {rest}{_clipped(predicted)}"),
        ("bottleneck", _BOTTLENECK.get(predicted.bottleneck, predicted.bottleneck)),
        ("disk per step", "{} read, {} written".format(*map(format_bytes, traffic))),
        ("peak RAM", f"{format_bytes(predicted.peak_ram_bytes)} of {format_bytes(plan.budget_bytes)}"),
    ]
    if any(traffic) and predicted.disk_seconds >= 1e-6:
        rows[2] = (rows[2][0], f"{rows[2][1]}; the disk is busy for {format_seconds(predicted.disk_seconds)}")
    if plan.device is not None:
        moved = (predicted.sent_bytes_per_step, predicted.received_bytes_per_step)
        rows.append(("link per step", "{} sent, {} received".format(*map(format_bytes, moved))))
        peak = map(format_bytes, (predicted.peak_device_bytes, plan.device.memory_bytes))
        rows.append(("peak on device", "{} of {}".format(*peak)))
    every = plan.checkpoint.snapshot_steps
    if every and predicted.snapshot_bytes:
        text = f"{format_bytes(predicted.snapshot_bytes)} written in the background"
        text += f" every {_count(every, 'step')}"
        added = predicted.snapshot_seconds
        text += f"; adds {format_seconds(added)} to that step" if added >= 1e-6 else "; adds no time"
        rows.append(("full copy", text))
    if steps:
        copies = steps // every * predicted.snapshot_seconds if every else 0.0
        seconds = format_seconds(steps * predicted.step_seconds + copies)
        rows.insert(1, ("run", f"{_count(steps, 'step')} in {seconds}, evaluation and export come on top"))
        rows += _wear(situation, plan, steps)
    return rows


def _waits(plan: Plan) -> str:
    return "the disk" if plan.device is None else "disk, link and updates"


def _wear(situation: Situation, plan: Plan, steps: int) -> list[tuple[str, str]]:
    found = wear(situation, plan, steps)
    if found.per_terabyte is None:
        return []
    unit = "samples" if isinstance(situation.shape, ModuleShape) else "tokens"
    text = f"{format_bytes(found.run_bytes)} written in the run"
    if found.endurance_bytes:
        text += f", {format_share(found.share)} of the disk's rated {found.rating}"
    rows = [("wear", text), ("", f"{found.per_terabyte:,.0f} {unit} per TB written")]
    if found.doubled_bytes < found.run_bytes:
        half = f"{format_bytes(found.doubled_bytes)} for the same {unit} in steps of twice as many rows"
        rows[1] = ("", f"{rows[1][1]}; {half}")
    return rows


def given_up(situation: Situation, found: Found) -> Table:
    """What the budget costs: this plan against the fastest with room for everything."""
    title = "given up for the budget"
    free, plan = found.unbounded, found.plan
    if situation.fixed:
        return Table(title, notes=("not looked at: a resumed run keeps its numerics",))
    if free is None or free.predicted is None or plan.predicted is None:
        return Table(title, notes=("nothing: more memory would not make it faster",))
    ours, theirs = plan.predicted, free.predicted
    if ours.step_seconds <= theirs.step_seconds * (1 + _LOST):
        return Table(title, notes=("nothing: no plan with more memory was found to be faster",))
    rows = []
    wanted = dict(decisions(situation.shape, free))
    for name, here in decisions(situation.shape, plan):
        if name not in ("streams", "commit") and here != wanted.get(name, here):
            rows.append((name, _brief(here), _brief(wanted[name])))
    slower = ours.step_seconds / theirs.step_seconds - 1
    enough = format_bytes(theirs.peak_ram_bytes * 1.01).replace(" ", "")
    cost = (
        f"cost: {format_seconds(ours.step_seconds)} per step instead of {format_seconds(theirs.step_seconds)}"
    )
    cost += f" ({slower:+.0%}); --ram {enough} would have room"
    return Table(title, tuple(rows), ("", "this plan", "with room"), notes=(cost,))


def _brief(how: str) -> str:
    """Without what is said in parentheses or after a semicolon."""
    return how.split(" (")[0].split("; ")[0]


def _in_short(plan: Plan, beside: Plan) -> str:
    """A plan's decisions in a line; the lesser ones where they are not those of `beside`."""
    place = plan.placement
    parts = [
        plan.update,
        f"state {place.state}, weights {place.weights}, gradients {place.gradients}",
        f"{_count(sum(plan.recompute), 'layer')} recomputed",
        f"{'+'.join(map(str, plan.numerics.micro_rows))} rows",
    ]
    lesser = [_lesser(one) for one in (plan, beside)]
    return ", ".join(parts + [here for here, there in zip(*lesser, strict=True) if here != there])


def _lesser(plan: Plan) -> tuple[str, ...]:
    """The same decisions of every plan, each in words."""
    place, numerics = plan.placement, plan.numerics
    return (
        "updates made ahead" if plan.speculate else "no updates ahead",
        f"inputs {place.inputs}",
        f"weights of {_count(place.kept_weights, 'block')} kept",
        f"state of {_count(place.kept_state, 'block')} kept",
        f"{plan.order} first",
        f"vocabulary in {_count(numerics.vocabulary_parts, 'part')}",
        f"loss of {_count(numerics.loss_chunk, 'token')} at once",
    )


def others(found: Found) -> Table:
    """The next best that fit, each unlike the plan and the others before it by more than its streams' cut."""
    rows, said = [], {_in_short(found.plan, found.plan)}
    for other in found.runners_up:
        how = _in_short(other, found.plan)
        if other.predicted is None or how in said:
            continue
        said.add(how)
        seconds, ram = other.predicted.step_seconds, other.predicted.peak_ram_bytes
        rows.append((format_seconds(seconds), format_bytes(ram), how))
    searched = (
        f"{found.possible:,} plans possible, {found.bounded:,} cannot fit, "
        f"{found.simulated:,} simulated task by task"
    )
    return Table("also fits" if rows else "search", tuple(rows), right=frozenset({0, 1}), notes=(searched,))


def tables(situation: Situation, found: Found, steps: int | None = None) -> list[Table]:
    """The whole plan, table by table.

    Args:
        steps: left to run, where that is known.
    """
    plan = found.plan
    return [
        Table(f"plan for {format_bytes(plan.budget_bytes)} of RAM", tuple(decisions(situation.shape, plan))),
        Table("predicted", tuple(times(situation, plan, steps))),
        phases(plan),
        given_up(situation, found),
        others(found),
    ]


def explain(situation: Situation, found: Found, steps: int | None = None) -> str:
    """The whole plan as text."""
    return plain(tables(situation, found, steps))
