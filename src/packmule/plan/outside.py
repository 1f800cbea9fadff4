"""Bytes that a training child holds outside its arena, above its baseline."""

from __future__ import annotations

from collections.abc import Iterable

from packmule.graph.step import StepGraph
from packmule.shapes.bodies import compiled_bytes, dtypes, rope_bytes
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Plan

STAGING_BYTES = 32 << 20
"""Import and export hold at most this much (one chunk and its conversions), and no workspace; some
of it is there for what the heap's gaps and short-lived objects take."""

TASK_BYTES = 2500
"""Objects of one task in Python: graph columns, buffers' ranges, tensors' views, its times (M: 1.5
to 2.5 kB)."""


def batch_bytes(plan: Plan) -> int:
    """Token ids, targets and positions of one step's micro-batches."""
    return sum(plan.numerics.micro_tokens) * (8 + 8 + 4)


def workspace(graph: StepGraph) -> int:
    """Most bytes any one task holds outside the arena."""
    return int(graph.workspace.max(initial=0))


def held_bytes(shape: ModelShape, plan: Plan, graphs: Iterable[StepGraph]) -> int:
    """What stays: compiled kernels, rotary tables, the graphs' objects, a step's tokens."""
    tasks, types = sum(graph.tasks for graph in graphs), dtypes(plan.numerics)
    tables = rope_bytes(shape, plan.numerics.max_seq_length, types)
    return compiled_bytes(types) + tables + TASK_BYTES * tasks + batch_bytes(plan)


def outside_bytes(
    shape: ModelShape, plan: Plan, graphs: Iterable[StepGraph], staging: int = STAGING_BYTES
) -> int:
    """What stays, and the most that comes and goes."""
    every = list(graphs)
    return held_bytes(shape, plan, every) + max([staging, *(workspace(graph) for graph in every)])
