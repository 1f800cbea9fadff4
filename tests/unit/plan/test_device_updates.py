"""How many chunks the device updates: what the search chooses is the best there is, and it is shorter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.plan.situations import GIB, make_situation

from packmule.graph.costs import Costs
from packmule.graph.kinds import UPDATES, TaskKind
from packmule.graph.model import PlannedModel
from packmule.graph.simulate import simulate
from packmule.graph.training import build_step
from packmule.plan.candidates import allowed
from packmule.plan.explain import explain
from packmule.plan.predict import step_only
from packmule.plan.search import search
from packmule.plan.sharing import balanced_share, climb
from packmule.plan.situation import Situation
from packmule.shapes.bodies import dtypes
from packmule.shapes.model import ModelShape
from packmule.spec.hardware import MatmulPoint, fake_device
from packmule.spec.job import HardwareSection
from packmule.spec.plan import Plan, SharedUpdates, Update

LINK = 12e9
NEAR = 1.05
"""A share whose step is within this of the best one's is as good."""

TAIL = {*UPDATES, TaskKind.SEND_STATE}

MODES: tuple[Update, ...] = ("on-backward", "after-backward", "on-fetch")


def situation(
    seed: int, update: Update, state: str = "ram", memory: float = 1e10, rows: int = 2, name: str = "fake"
) -> Situation:
    """Cores whose memory is slow beside a link to a device that is fast.

    Args:
        memory: bytes per second of the cores' memory.
    """
    shape = ModelShape(
        vocab=1000, hidden=512, layers=4, heads=8, kv_heads=8, head_dim=64, ffn=1500, norm_eps=1e-5,
        rope_theta=1e4, tied=False, max_positions=512,
    )  # fmt: skip
    base = make_situation(random.Random(seed))
    points = {kind: (MatmulPoint(size=1024, flops_per_second=2e13),) for kind in base.hardware.matmul}
    disk = base.hardware.disks[0].model_copy(
        update={f"{kind}_bytes_per_second": 6e9 for kind in ("read", "write", "mix")}
    )
    hardware = base.hardware.model_copy(update={"memory_bytes_per_second": memory, "disks": (disk,)})
    device = fake_device(hardware).model_copy(
        update={
            "name": name, "matmul": points, "memory_bytes_per_second": 5e11, "memory_bytes": 4 * GIB,
            "send_bytes_per_second": LINK, "receive_bytes_per_second": LINK,
        }
    )  # fmt: skip
    numerics = base.numerics.model_copy(
        update={
            "micro_rows": (rows,), "max_seq_length": 64, "precision": "bf16-mixed", "clip": None,
            "device": None if name == "fake" else device.model,
        }
    )  # fmt: skip
    return replace(
        base, shape=shape, hardware=hardware, numerics=numerics, update=update, vocabulary_parts=1,
        evaluation_rows=(), sample_tokens=0, wishes=HardwareSection(state=state), device=device,
        device_bytes=2 * GIB, costs=Costs.of(hardware, dtypes(numerics).product, disk, device),
    )  # fmt: skip


def shared(plan: Plan, share: int) -> Plan:
    return plan.model_copy(update={"device_updates": share})


@pytest.mark.parametrize("state", ["ram", "disk"])
@pytest.mark.parametrize("update", MODES)
def test_the_chosen_share_is_as_good_as_the_best_of_all(update: Update, state: str, seed: int) -> None:
    memory = 10 ** random.Random(seed).uniform(9.7, 10.6)
    problem = situation(seed, update, state, memory)
    plan = search(problem).plan
    seconds = [step_only(problem, shared(plan, share)).seconds for share in range(101)]
    assert seconds[plan.device_updates] <= NEAR * min(seconds), (memory, plan.device_updates)


@pytest.mark.parametrize("update", MODES)
def test_a_shared_step_is_shorter_than_one_of_the_cores_or_the_device_alone(
    update: Update, seed: int
) -> None:
    problem = situation(seed, update, memory=2e10)
    plan = search(problem).plan
    chosen, cores, device = (
        step_only(problem, shared(plan, share)).seconds for share in (plan.device_updates, 0, 100)
    )
    assert 0 < plan.device_updates < 100
    assert chosen < 0.75 * cores and chosen < 0.95 * device
    assert "the state, the cores the rest" in explain(problem, search(problem))


def test_a_share_that_balances_rates_is_about_the_best_of_updates_alone(seed: int) -> None:
    """Two executors and a link with nothing else to do: the closed form. Chunks are many, so that how they
    fall on blocks matters little."""
    memory = 10 ** random.Random(seed).uniform(9.7, 10.4)
    problem = situation(seed, "after-backward", memory=memory)
    plan = search(problem).plan
    plan = plan.model_copy(update={"io": plan.io.model_copy(update={"chunk_bytes": 1 << 19})})

    def seconds(share: int) -> float:
        planned = PlannedModel(problem.shape, shared(plan, share))
        graph = build_step(planned, problem.costs, problem.mean_length)
        updates = [task for task in range(graph.tasks) if graph.kind[task] in TAIL]
        line = simulate(graph)
        return float(line.end.max() - line.start[updates].min())

    balanced = balanced_share(problem.shape, plan, problem)
    every = [seconds(share) for share in range(0, 101, 5)]
    assert seconds(balanced) <= 1.1 * min(every), (memory, balanced, every)


def test_updates_that_cost_nothing_beside_the_computation_are_left_to_the_cores(seed: int) -> None:
    problem = situation(seed, "on-backward", memory=1e13, rows=6)
    assert search(problem).plan.device_updates == 0


def test_a_rule_that_looks_at_whole_tensors_is_left_to_the_cores(seed: int) -> None:
    problem = situation(seed, "on-backward")
    rule = problem.numerics.optimizer.model_copy(update={"rule": "adalomo"})
    problem = replace(problem, numerics=problem.numerics.model_copy(update={"optimizer": rule}))
    plan = search(problem).plan
    assert plan.device_updates == 0 and not allowed(shared(plan, 50))
    with pytest.raises(ValueError, match="elements alone"):
        PlannedModel(problem.shape, shared(plan, 50))


def test_a_run_on_a_gpu_keeps_the_chunks_that_it_updates(seed: int) -> None:
    """There an update rounds otherwise, so who makes it fixes bits."""
    problem = situation(seed, "after-backward", name="cuda:0")
    plan = search(problem).plan
    split = SharedUpdates(percent=plan.device_updates, chunk_bytes=plan.io.chunk_bytes)
    assert plan.device_updates and plan.numerics.shared_updates == split
    for change in (
        {"device_bytes": GIB},
        {"wishes": HardwareSection(state="disk")},
        {"update": "on-backward"},
    ):
        again = replace(problem, numerics=plan.numerics, fixed=True, **change)
        other = search(again).plan
        assert other.numerics == plan.numerics
        assert (other.device_updates, other.io.chunk_bytes) == (split.percent, split.chunk_bytes)
    none = plan.numerics.model_copy(update={"shared_updates": None})
    assert search(replace(problem, numerics=none, fixed=True)).plan.device_updates == 0


def test_climbing_finds_the_lowest_of_any_valley(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        low, left, right = rng.randint(0, 100), rng.uniform(0.1, 3), rng.uniform(0.1, 3)

        def seconds(share: int) -> float:
            return (left if share < low else right) * abs(share - low)  # noqa: B023

        assert abs(climb(seconds, rng.randint(0, 100)) - low) <= 1
