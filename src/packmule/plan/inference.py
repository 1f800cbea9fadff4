"""A plan for evaluating or generating: which weights stay, how many rows at once."""

from __future__ import annotations

from packmule.errors import DoesNotFit
from packmule.graph.costs import Costs
from packmule.graph.kinds import Tier
from packmule.graph.model import PlannedModel
from packmule.graph.run import inference_graphs
from packmule.graph.simulate import simulate
from packmule.plan.outside import outside_bytes
from packmule.shapes.module import ModuleShape, Shape
from packmule.spec.plan import CheckpointPlan, Io, Numerics, Placement, Plan
from packmule.spec.units import format_bytes


def inference_plan(
    shape: Shape,
    numerics: Numerics,
    costs: Costs,
    budget_bytes: int,
    baseline_bytes: int,
    chunk_bytes: int,
    mean_length: float,
    evaluation_rows: tuple[int, ...],
    positions: int,
) -> Plan:
    """The fastest plan that fits, over weights kept or streamed and rows at once.

    Args:
        numerics: of the run; micro-batches are chosen anew (a loss does not depend on them).
        chunk_bytes: of the state that is read.

    Raises:
        DoesNotFit: says how much is missing.
    """
    best: tuple[float, Plan] | None = None
    least: int | None = None
    for weights in ("ram", "state"):
        for rows in _sizes(shape):
            plan = Plan(
                budget_bytes=budget_bytes,
                numerics=numerics.model_copy(
                    update={
                        "micro_rows": (rows,),
                        "loss_chunk": min(numerics.loss_chunk, rows * numerics.max_seq_length),
                    }
                ),
                placement=Placement(state="disk", weights=weights),
                order="breadth",
                recompute=(True,) * shape.layers,
                update="after-backward",
                io=Io(prefetch=1, chunk_bytes=chunk_bytes),
                checkpoint=CheckpointPlan(commit_steps=1, snapshot_steps=None),
            )
            makers = inference_graphs(
                PlannedModel(shape, plan), costs, mean_length, evaluation_rows, positions
            )
            graphs = {name: make() for name, make in makers.items()}
            arena = max(graph.extent(Tier.RAM) for graph in graphs.values())
            ram = baseline_bytes + arena + outside_bytes(shape, plan, graphs.values(), staging=0)
            least = ram if least is None else min(least, ram)
            if ram > budget_bytes:
                continue
            batches = sum(-(-count // rows) for count in evaluation_rows)
            seconds = sum(
                simulate(graph).seconds * _times(name, batches, positions) for name, graph in graphs.items()
            )
            if best is None or seconds < best[0]:
                best = seconds, plan
    if best is None:
        needed, enough = format_bytes(least or 0), format_bytes((least or 0) * 1.01).replace(" ", "")
        raise DoesNotFit(
            f"This needs at least {needed} of RAM; the budget is {format_bytes(budget_bytes)}.",
            f"--ram {enough} is enough" + ("; a shorter text needs less" if positions else ""),
        )
    return best[1]


def _sizes(shape: Shape) -> tuple[int, ...]:
    """Rows at once that are tried, the most first: for modules of a user's own, those that were measured."""
    if not isinstance(shape, ModuleShape):
        return (8, 4, 2, 1)
    measured = {cost.rows for cost in shape.costs[0] if cost.rows <= shape.most_rows}
    return tuple(sorted(measured | {1}, reverse=True))


def _times(name: str, batches: int, positions: int) -> int:
    """How often a graph runs."""
    if name.startswith("evaluate"):
        return batches
    return positions if name == "token" else 1
