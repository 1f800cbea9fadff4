"""Every graph that a run executes, by name: what the engine runs is what the planner adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

from packmule.graph.costs import Costs
from packmule.graph.kinds import Tier
from packmule.graph.model import PlannedModel
from packmule.graph.phases import build_commit, build_decode, build_evaluate, build_fill, build_load
from packmule.graph.step import StepGraph
from packmule.graph.training import build_drain, build_step
from packmule.spec.plan import Plan

SNAPSHOT = ", snapshot"
"""Ends the names of graphs that make a snapshot."""

SPECULATING = ", speculating"
"""Ends the names of steps' graphs that update before the clip factor is known."""


def evaluation_batches(plan: Plan, rows: int) -> list[tuple[int, ...]]:
    """Rows of each micro-batch of each evaluation graph, in order.

    Micro-batches are as large as training's largest, and as many go through one graph as a
    step has, so that evaluation needs no more memory than a step.
    """
    size = max(plan.numerics.micro_rows)
    at_once = len(plan.numerics.micro_rows) if plan.order == "breadth" else 1
    micros = [min(size, rows - start) for start in range(0, rows, size)]
    return [tuple(micros[start : start + at_once]) for start in range(0, len(micros), at_once)]


Maker = Callable[[], StepGraph]


def run_graphs(
    model: PlannedModel,
    costs: Costs,
    mean_length: float,
    evaluation_rows: tuple[int, ...],
    sample_tokens: int,
) -> dict[str, Maker]:
    """The graphs of a run, each made when it is called for and kept; those of groups are many, and not
    kept.

    Args:
        evaluation_rows: of each evaluation set.
        sample_tokens: positions of a generated text, prompt included; 0: no samples.

    Returns:
        "load"; "step" and "step, commit" (for on-fetch: with the pending update); "first" and
        "drain" for on-fetch; "commit"; "evaluate N" for N micro-batches at once; "prompt", "token".
        Where there are snapshots, also those that commit with `SNAPSHOT` after their name. Where the
        plan speculates, "first" and "step, commit" with `SPECULATING` after their name, too.
        While the batch warms up, steps of fewer micro-batches too: `fewer`. Where blocks take turns,
        each step once per group: `grouped`.
    """
    plan = model.plan
    pending = plan.update == "on-fetch"
    found: dict[str, Maker] = {
        "load": cache(partial(build_load, model, costs)),
        **_steps(model, costs, mean_length),
        "commit": cache(partial(build_commit, model, costs)),
    }
    if pending:
        found["drain"] = cache(partial(build_drain, model, costs))
    if plan.checkpoint.snapshot_steps and pending:
        found[f"drain{SNAPSHOT}"] = cache(partial(build_drain, model, costs, snapshot=True))
    elif plan.checkpoint.snapshot_steps and plan.commits_late:
        found[f"commit{SNAPSHOT}"] = cache(partial(build_commit, model, costs, snapshot=True))
    numerics = plan.numerics
    stages = numerics.growth.stages(numerics.rows) if numerics.growth else []
    for count in sorted({len(numerics.cut(rows)) for _, rows in stages} - {len(numerics.micro_rows)}):
        part = numerics.model_copy(update={"micro_rows": numerics.micro_rows[:count]})
        small = PlannedModel(model.shape, plan.model_copy(update={"numerics": part}))
        found |= {fewer(name, count): graph for name, graph in _steps(small, costs, mean_length).items()}
    found.update(_reading_graphs(model, costs, mean_length, evaluation_rows, sample_tokens))
    return found


def extents_of(graphs: Iterable[StepGraph]) -> dict[Tier, int]:
    """Bytes of each tier that the largest graph spans. They are asked for one at a time."""
    most = dict.fromkeys(Tier, 0)
    for graph in graphs:
        most = {tier: max(size, graph.extent(tier)) for tier, size in most.items()}
    return most


def fewer(name: str, micros: int) -> str:
    """The name of a step's graph with only its first micro-batches."""
    return f"{name}, {micros} micro-batches"


def grouped(name: str, group: int | None) -> str:
    """The name of a step's graph that trains a group."""
    return name if group is None else f"{name}, group {group}"


def _steps(model: PlannedModel, costs: Costs, mean_length: float) -> dict[str, Maker]:
    pending = model.plan.update == "on-fetch"
    kinds = {"step": {}, "step, commit": {"commit": True}}
    if model.plan.checkpoint.snapshot_steps:
        kinds[f"step, commit{SNAPSHOT}"] = {"commit": True, "snapshot": True}
    make = partial(build_step, model, costs, mean_length)
    found: dict[str, Maker] = {}
    for group in range(len(model.groups)) if model.groups else (None,):
        for name, choices in kinds.items():
            maker = partial(make, pending=pending, group=group, **choices)
            found[grouped(name, group)] = maker if model.groups else cache(maker)
    if pending:
        found["first"] = cache(make)
    if model.plan.speculate:
        found[f"first{SPECULATING}"] = cache(partial(make, speculate=True))
        ahead = partial(make, pending=True, commit=True, speculate=True)
        found[f"step, commit{SPECULATING}"] = cache(ahead)
    return found


def inference_graphs(
    model: PlannedModel,
    costs: Costs,
    mean_length: float,
    evaluation_rows: tuple[int, ...],
    sample_tokens: int,
) -> dict[str, Maker]:
    """The graphs of evaluating or generating from a commit: "load" and those that read.

    The plan's placement has state on disk and weights in RAM or made from the state.
    """
    found: dict[str, Maker] = {"load": cache(partial(build_fill, model, costs))}
    found.update(_reading_graphs(model, costs, mean_length, evaluation_rows, sample_tokens))
    return found


def _reading_graphs(
    model: PlannedModel,
    costs: Costs,
    mean_length: float,
    evaluation_rows: tuple[int, ...],
    sample_tokens: int,
) -> dict[str, Maker]:
    plan = model.plan
    found: dict[str, Maker] = {}
    if any(evaluation_rows):
        tokens = max(plan.numerics.micro_tokens)
        groups = [micros for rows in evaluation_rows for micros in evaluation_batches(plan, rows)]
        for count in sorted({len(micros) for micros in groups}):
            make = partial(build_evaluate, model, costs, mean_length, (tokens,) * count)
            found[f"evaluate {count}"] = cache(make)
    if sample_tokens:
        found["prompt"] = cache(partial(build_decode, model, costs, sample_tokens, sample_tokens))
        found["token"] = cache(partial(build_decode, model, costs, 1, sample_tokens))
    return found
