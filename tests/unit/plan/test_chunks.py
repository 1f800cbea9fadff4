"""Chunks of a stream: long where the disk turns slowly from reading to writing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import make_situation

from packmule.plan.search import LONG_CHUNKS, search
from packmule.shapes.model import ModelShape

SHAPE = ModelShape(
    vocab=1000, hidden=1024, layers=3, heads=8, kv_heads=8, head_dim=128, ffn=6000, norm_eps=1e-5,
    rope_theta=1e4, tied=False, max_positions=512,
)  # fmt: skip


@pytest.mark.parametrize(("turnaround", "longer"), [(0.0, False), (0.1, True)])
def test_a_disk_that_turns_slowly_is_read_and_written_in_long_chunks(
    turnaround: float, longer: bool, seed: int
) -> None:
    situation = make_situation(random.Random(seed))
    numerics = situation.numerics.model_copy(update={"precision": "bf16-mixed", "clip": None})
    costs = replace(situation.costs, read_bytes=1e8, write_bytes=1e8, turnaround_seconds=turnaround)
    wishes = situation.wishes.model_copy(update={"state": "disk"})
    found = search(
        replace(
            situation, shape=SHAPE, numerics=numerics, costs=costs, wishes=wishes, budget_bytes=1_100_000_000,
            evaluation_rows=(),
        )
    ).plan  # fmt: skip
    assert (found.io.chunk_bytes in LONG_CHUNKS) == longer
