"""Bytes that a training child holds outside its arena, above its baseline."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from packmule.graph.step import StepGraph
from packmule.shapes.bodies import compiled_bytes, dtypes, packed_bytes, rope_bytes
from packmule.shapes.model import ModelShape
from packmule.shapes.module import Shape
from packmule.spec.plan import Plan

STAGING_BYTES = 32 << 20
"""Import and export hold at most this much (one chunk and its conversions), and no workspace; some
of it is there for what the heap's gaps and short-lived objects take."""

TASK_BYTES = 2500
"""Objects of one task in Python: graph columns, buffers' ranges, tensors' views, its times (M: 1.5
to 2.5 kB)."""


SAMPLE_COPIES = 3
"""A sample joined with others, before that alone, and cast."""


def batch_bytes(shape: Shape, plan: Plan) -> int:
    """One step's micro-batches: token ids, targets and positions; or samples, joined, and what of them is
    cast to the compute dtype."""
    each = 8 + 8 + 4 if isinstance(shape, ModelShape) else SAMPLE_COPIES * shape.sample_bytes
    return sum(plan.numerics.micro_tokens) * each


def workspace(graph: StepGraph) -> int:
    """Most bytes any one task holds in RAM outside the arena."""
    return int(graph.workspace[~_on_device(graph)].max(initial=0))


def device_workspace(graph: StepGraph) -> int:
    """Most bytes any one task holds on a device outside its arena."""
    return int(graph.workspace[_on_device(graph)].max(initial=0))


def _on_device(graph: StepGraph) -> np.ndarray:
    if "device" not in graph.resources:
        return np.zeros(graph.tasks, bool)
    homes = graph.uses.values[graph.uses.starts[:-1]]
    return np.asarray(homes == graph.resources.index("device"))


def held_bytes(shape: Shape, plan: Plan, graphs: Iterable[StepGraph]) -> int:
    """What stays: compiled kernels, rotary tables, the graphs' objects, a step's tokens."""
    tasks, types = sum(graph.tasks for graph in graphs), dtypes(plan.numerics)
    held = TASK_BYTES * tasks + batch_bytes(shape, plan)
    if isinstance(shape, ModelShape):
        held += compiled_bytes(types) + packed_bytes(shape, plan.numerics)
        held += rope_bytes(shape, plan.numerics.max_seq_length, types)
    return held  # what modules keep is in their process's memory as it was measured


def outside_bytes(shape: Shape, plan: Plan, graphs: Iterable[StepGraph], staging: int = STAGING_BYTES) -> int:
    """What stays, and the most that comes and goes."""
    every = list(graphs)
    return held_bytes(shape, plan, every) + max([staging, *(workspace(graph) for graph in every)])
