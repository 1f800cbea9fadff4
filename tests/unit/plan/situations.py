"""Random planning problems of small models, and random plans for them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.parity.architectures import ARCHITECTURES

from packmule.graph.costs import Costs
from packmule.plan.candidates import candidates, keeps_whole
from packmule.plan.situation import Situation
from packmule.shapes.bodies import DTYPES
from packmule.shapes.experts import Experts
from packmule.shapes.layer import LayerKind
from packmule.shapes.model import ModelShape
from packmule.spec.hardware import DiskSpeed, Hardware, MatmulPoint
from packmule.spec.job import HardwareSection
from packmule.spec.plan import CheckpointPlan, Io, Numerics, OptimizerNumerics, Plan, ScheduleNumerics

GIB = 1 << 30


def make_hardware(rng: random.Random) -> Hardware:
    """A machine with rates of the usual order."""
    rate = 10 ** rng.uniform(10, 12)
    points = {
        name: (MatmulPoint(size=1024, flops_per_second=rate * factor),)
        for name, factor in (("float32", 1.0), ("bfloat16", 2.0), ("float64", 0.5))
    }
    disk = 10 ** rng.uniform(8, 9.7)
    return Hardware(
        date="2025-01-01", host="here", cpu="cpu", cpu_features=(), threads=2,
        ram_total_bytes=64 * GIB, ram_available_bytes=60 * GIB, ram_limit_source="/proc/meminfo",
        matmul=points, memory_bytes_per_second=2e10, task_seconds=4e-5,
        disks=(
            DiskSpeed(
                path="/", direct=True, read_bytes_per_second=disk, write_bytes_per_second=disk * 0.8,
                mix_bytes_per_second=disk * 0.9, sync_seconds=0.004, free_bytes=1 << 40,
            ),
        ),
        parent_baseline_bytes=60_000_000, child_baseline_bytes=260_000_000,
    )  # fmt: skip


def make_kinds(rng: random.Random, layers: int) -> tuple[LayerKind, ...]:
    """Every layer dense, or some with experts."""
    if rng.random() < 0.5:
        return ()
    count = rng.randint(2, 8)
    experts = Experts(
        count=count, chosen=rng.randint(1, count), width=rng.randint(8, 60), renormalize=True,
        balance=rng.choice((0.0, 0.01)), groups=rng.randint(1, count),
    )  # fmt: skip
    return tuple(LayerKind(feed_forward=experts if rng.random() < 0.7 else None) for _ in range(layers))


def make_situation(rng: random.Random) -> Situation:
    """A tiny model of some architecture on such a machine, with room for anything."""
    heads = rng.choice((2, 4))
    head_dim = rng.choice((8, 16))
    layers = rng.randint(1, 5)
    shape = ModelShape(
        vocab=rng.randint(50, 2000), hidden=heads * head_dim, layers=layers, heads=heads,
        kv_heads=rng.choice((1, heads)), head_dim=head_dim, ffn=rng.randint(16, 200), norm_eps=1e-5,
        rope_theta=1e4, tied=rng.random() < 0.5, max_positions=512, kinds=make_kinds(rng, layers),
    )  # fmt: skip
    if rng.random() < 0.5:
        shape = rng.choice(ARCHITECTURES).shape(rng)
    hardware = make_hardware(rng)
    precision = rng.choice(("fp32", "bf16-mixed", "fp64"))
    numerics = Numerics(
        precision=precision, micro_rows=(rng.randint(1, 6),), max_seq_length=rng.randint(8, 200),
        loss_chunk=512, clip=rng.choice((None, 1.0)), optimizer=OptimizerNumerics(),
        schedule=ScheduleNumerics(learning_rate=1e-3, total_steps=10),
        seed=0, threads=2, kernels="native", torch="2.13.0", cpu_features=(),
    )  # fmt: skip
    return Situation(
        shape=shape,
        hardware=hardware,
        costs=Costs.of(hardware, DTYPES[precision].product, hardware.disks[0]),
        budget_bytes=16 * GIB,
        numerics=numerics,
        fixed=False,
        micro_rows=None,
        recompute=None,
        update=None,
        wishes=HardwareSection(),
        checkpoint=CheckpointPlan(commit_steps=1, snapshot_steps=None),
        commit_auto=True,
        mean_length=numerics.max_seq_length * rng.uniform(0.2, 1.0),
        evaluation_rows=rng.choice(((), (3,), (5, 2))),
        sample_tokens=rng.choice((0, 7)),
        disk_free_bytes=1 << 40,
        total_steps=10,
    )


def random_plans(rng: random.Random, situation: Situation, count: int) -> list[Plan]:
    """Some of the candidates, with streams cut at random."""
    every = list(candidates(replace(situation)))
    plans = rng.sample(every, min(count, len(every)))
    cuts = [
        Io(
            prefetch=rng.randint(0, 3),
            chunk_bytes=rng.choice((4096, 65536, 1 << 20)),
            read_ahead=rng.choice((1, 2, 3, 9)),
        )
        for _ in plans
    ]
    return [
        plan.model_copy(update={"io": io, "numerics": _cut(rng, plan)})
        for plan, io in zip(plans, cuts, strict=True)
    ]


def _cut(rng: random.Random, plan: Plan) -> Numerics:
    """The plan's numerics, where that is allowed at times with the vocabulary in parts."""
    may = plan.order == "breadth" and keeps_whole(plan.numerics) is None
    parts = rng.choice((1, rng.randint(2, 9))) if may else 1
    return plan.numerics.model_copy(update={"vocabulary_parts": parts})
