"""Plans with a device: bounds hold, its memory decides what stays there, and a refusal names it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import GIB, make_situation, random_plans

from packmule.errors import DoesNotFit
from packmule.graph.costs import Costs
from packmule.graph.kinds import Tier
from packmule.graph.model import PlannedModel
from packmule.graph.simulate import simulate
from packmule.graph.training import build_step
from packmule.plan.bounds import device_bound, ram_bound, seconds_bound
from packmule.plan.explain import explain
from packmule.plan.search import search
from packmule.plan.situation import Situation
from packmule.shapes.bodies import dtypes
from packmule.shapes.model import ModelShape
from packmule.spec.hardware import fake_device

ROUNDING = 1e-9


def with_device(situation: Situation, memory: int = 4 * GIB, name: str = "cuda:0") -> Situation:
    """Twenty times as fast as the cores."""
    hardware = situation.hardware
    points = {
        dtype: tuple(
            point.model_copy(update={"flops_per_second": 20 * point.flops_per_second}) for point in of
        )
        for dtype, of in hardware.matmul.items()
    }
    changes = {"name": name, "matmul": points, "context_bytes": 100 << 20, "memory_bytes": 4 * GIB}
    device = fake_device(hardware).model_copy(update=changes)
    costs = Costs.of(hardware, dtypes(situation.numerics).product, hardware.disks[0], device)
    return replace(situation, device=device, device_bytes=memory, costs=costs)


def test_no_step_is_below_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        situation = with_device(make_situation(rng))
        for plan in random_plans(rng, situation, 2):
            assert plan.device is not None
            count = rng.choice((0, 1, len(PlannedModel(situation.shape, plan).blocks)))
            placement = plan.placement.model_copy(update={"device_weights": count})
            share = rng.choice((0, rng.randint(1, 100)))
            plan = plan.model_copy(update={"placement": placement, "device_updates": share})
            graph = build_step(
                PlannedModel(situation.shape, plan),
                situation.costs,
                situation.mean_length,
                pending=plan.update == "on-fetch",
            )
            graph.check()
            assert ram_bound(situation.shape, plan) <= graph.extent(Tier.RAM), plan
            assert device_bound(situation.shape, plan) <= graph.extent(Tier.DEVICE), plan
            busy = seconds_bound(situation.shape, plan, situation.costs, situation.mean_length)
            assert max(busy) <= simulate(graph).seconds * (1 + ROUNDING), plan


@pytest.fixture
def model(seed: int) -> Situation:
    shape = ModelShape(
        vocab=2000, hidden=256, layers=8, heads=4, kv_heads=4, head_dim=64, ffn=512, norm_eps=1e-5,
        rope_theta=1e4, tied=False, max_positions=512,
    )  # fmt: skip
    situation = make_situation(random.Random(seed))
    numerics = situation.numerics.model_copy(
        update={"micro_rows": (4,), "max_seq_length": 128, "precision": "fp32", "clip": None}
    )
    return replace(situation, shape=shape, numerics=numerics, update="on-backward", vocabulary_parts=1)


def test_weights_stay_on_the_device_as_far_as_its_memory_goes(model: Situation) -> None:
    kept = []
    for memory in (150 << 20, 170 << 20, 2 * GIB):
        plan = search(with_device(model, memory)).plan
        assert plan.predicted is not None and plan.device is not None
        assert 0 < plan.predicted.peak_device_bytes <= memory == plan.device.memory_bytes
        kept.append(plan.placement.device_weights)
    # With little, the search may rather spend it on larger micro-batches.
    assert max(kept[:2]) < kept[2] == model.shape.layers + 2


def test_a_plan_says_what_is_on_the_device_and_what_goes_over_the_link(model: Situation) -> None:
    situation = with_device(model)
    found = search(situation)
    text, plan = explain(situation, found), found.plan
    assert plan.predicted is not None
    assert "cuda:0 computes, in" in text and "link per step" in text and "peak on device" in text
    # All weights stay: they are sent once, as they are updated, and so is every gradient received.
    total = sum(block.layout("float32").bytes for block in model.shape.blocks())
    assert (plan.predicted.sent_bytes_per_step, plan.predicted.received_bytes_per_step) == (total, total)


def test_a_device_that_is_too_small_is_named_with_what_is_enough(model: Situation) -> None:
    with pytest.raises(DoesNotFit) as caught:
        search(with_device(model, 101 << 20))
    assert "memory of `cuda:0`" in caught.value.cause and "--device cpu" in str(caught.value.hint)
    enough = str(caught.value.hint).split("--device-memory ")[1].split("MB")[0]
    memory = int(float(enough) * 1e6)
    assert search(with_device(model, memory)).plan.predicted is not None


def test_the_memory_of_a_fake_device_counts_in_that_of_the_machine(model: Situation) -> None:
    real, fake = (search(with_device(model, 150 << 20, name)).plan.predicted for name in ("cuda:0", "fake"))
    assert real is not None and fake is not None
    assert fake.peak_ram_bytes == real.peak_ram_bytes + fake.peak_device_bytes
