"""Updates before the clip factor is known: planned where the disk would keep forward waiting."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.unit.plan.situations import make_situation

from packmule.plan.search import search
from packmule.shapes.model import ModelShape

SHAPE = ModelShape(
    vocab=500, hidden=512, layers=12, heads=4, kv_heads=4, head_dim=128, ffn=2000, norm_eps=1e-5,
    rope_theta=1e4, tied=False, max_positions=512,
)  # fmt: skip


def test_a_slow_disk_is_used_while_backward_runs(seed: int) -> None:
    """State moves for a second, computing takes two, of which forward is half of one."""
    situation = make_situation(random.Random(seed))
    numerics = situation.numerics.model_copy(
        update={"precision": "bf16-mixed", "clip": 1.0, "max_seq_length": 256, "micro_rows": (8,)}
    )
    matmul = 6 * SHAPE.numel * 256 * 8 / 2.0
    disk = 24 * SHAPE.numel / 1.0
    costs = replace(
        situation.costs, matmul_flops=matmul, attention_flops=1e15, memory_bytes=1e12, read_bytes=disk,
        write_bytes=disk, turnaround_seconds=0.0, task_seconds=1e-6, sync_seconds=1e-4,
    )  # fmt: skip
    wishes = situation.wishes.model_copy(update={"state": "disk"})
    asked = replace(
        situation, shape=SHAPE, numerics=numerics, costs=costs, wishes=wishes, update="on-fetch",
        evaluation_rows=(), mean_length=256.0, budget_bytes=900_000_000,
    )  # fmt: skip
    plan = search(asked).plan
    assert plan.speculate and plan.predicted is not None
    assert plan.predicted.step_seconds < 0.95 * plan.predicted.clipped_step_seconds
    free = replace(asked, numerics=numerics.model_copy(update={"clip": None}))
    assert not search(free).plan.speculate
