"""Planner and engine mean the same memory, to the byte."""

from __future__ import annotations

import random
from pathlib import Path

from tests.exactness.runs import open_store
from tests.unit.plan.situations import make_situation, random_plans

from packmule.engine.engine import Engine, Needs
from packmule.graph.model import PlannedModel
from packmule.kernels import load
from packmule.plan.outside import outside_bytes
from packmule.plan.predict import baseline, graphs, predict
from packmule.shapes.bodies import DTYPES, compiled_bytes
from packmule.shapes.layout import PAGE
from packmule.tiers.disk import PosixDisk


def test_the_predicted_arena_is_the_engines(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kernels = load(1, "torch")
    for case in range(6):
        situation = make_situation(rng)
        for number, plan in enumerate(random_plans(rng, situation, 3)):
            outside = outside_bytes(situation.shape, plan, graphs(situation, plan).values())
            predicted = predict(situation, plan)
            arena = predicted.peak_ram_bytes - outside - baseline(situation)
            folder = tmp_path / f"{case} {number}"
            folder.mkdir()
            store = open_store(folder, situation.shape, plan, kernels, PosixDisk())
            engine = Engine(
                PlannedModel(situation.shape, plan), kernels, store, PosixDisk(), folder, situation.costs,
                Needs(situation.mean_length, situation.evaluation_rows, situation.sample_tokens),
            )  # fmt: skip
            assert engine.arena.bytes == -(-arena // PAGE) * PAGE, plan
            engine.close()


def test_every_phase_adds_up_to_the_peak_of_the_run(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        situation = make_situation(rng)
        for plan in random_plans(rng, situation, 2):
            predicted = predict(situation, plan)
            for phase in predicted.phases:
                assert phase.ram_bytes == sum(phase.parts.values())
            assert max(phase.ram_bytes for phase in predicted.phases) == predicted.peak_ram_bytes, plan


def test_only_bfloat16_pays_for_compiled_products(seed: int) -> None:
    rng = random.Random(seed)
    situation = make_situation(rng)
    plan = random_plans(rng, situation, 1)[0]
    sizes = {}
    for precision in ("fp32", "bf16-mixed"):
        numerics = plan.numerics.model_copy(update={"precision": precision})
        sizes[precision] = outside_bytes(situation.shape, plan.model_copy(update={"numerics": numerics}), ())
    assert sizes["bf16-mixed"] - sizes["fp32"] == compiled_bytes(DTYPES["bf16-mixed"]) > 0
