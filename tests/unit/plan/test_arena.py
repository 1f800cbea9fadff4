"""Planner and engine mean the same memory, to the byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.exactness.runs import open_store
from tests.unit.plan.situations import make_situation, random_plans

from packmule.engine.engine import Engine, Needs
from packmule.graph.model import PlannedModel
from packmule.kernels import load
from packmule.plan.outside import outside_bytes
from packmule.plan.predict import baseline, graphs, predict
from packmule.shapes.bodies import DTYPES, compiled_bytes, packed_bytes
from packmule.shapes.layout import PAGE
from packmule.shapes.model import ModelShape
from packmule.tiers.disk import PosixDisk


def test_the_predicted_arena_is_the_engines(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kernels = load(1, "torch")
    for case in range(6):
        situation = make_situation(rng)
        for number, plan in enumerate(random_plans(rng, situation, 3)):
            outside = outside_bytes(
                situation.shape, plan, [make() for make in graphs(situation, plan).values()]
            )
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


def test_bfloat16_pays_for_compiled_products_and_float32_for_packing(seed: int) -> None:
    rng = random.Random(seed)
    situation = make_situation(rng)
    plan = random_plans(rng, situation, 1)[0]
    sizes, packed = {}, {}
    for precision in ("fp32", "bf16-mixed"):
        numerics = plan.numerics.model_copy(update={"precision": precision})
        sizes[precision] = outside_bytes(situation.shape, plan.model_copy(update={"numerics": numerics}), ())
        packed[precision] = packed_bytes(situation.shape, numerics)
    assert packed["bf16-mixed"] == 0
    compiled = compiled_bytes(DTYPES["bf16-mixed"])
    assert sizes["bf16-mixed"] - sizes["fp32"] == compiled - packed["fp32"] and compiled > 0


@pytest.mark.parametrize(
    ("tokens", "vocab", "measured"),
    # MiB with two threads, hidden size 768, on a CPU with AVX-512
    [(32, 148058, 18.8), (64, 148058, 37.1), (96, 148058, 55.5), (192, 148058, 31.2), (512, 148058, 33.8),
     (64, 65536, 16.9), (256, 16384, 26.2), (128, 16001, 1.5), (512, 8192, 16.1)],
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_packing_is_bounded_by_what_was_measured(
    tokens: int, vocab: int, measured: float, tied: bool, seed: int
) -> None:
    numerics = make_situation(random.Random(seed)).numerics.model_copy(
        update={
            "precision": "fp32", "products": None, "micro_rows": (1,), "max_seq_length": tokens,
            "loss_chunk": 512, "threads": 2,
        }
    )  # fmt: skip
    sizes = {"hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 12}
    config = {"model_type": "llama", **sizes, "vocab_size": vocab, "max_position_embeddings": 512}
    config["tie_word_embeddings"] = tied
    shape = ModelShape.from_config(config, "this test")
    packed = packed_bytes(shape, numerics) / 2**20
    assert measured - 2 <= packed <= max(36, 1.5 * measured)  # 2: of other threads' stacks and heaps
    assert packed_bytes(shape, numerics.model_copy(update={"threads": 1})) == 0
