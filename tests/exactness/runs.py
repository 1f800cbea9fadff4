"""Small runs for exactness tests: a planned model on a real folder, and the same run as a plain loop."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from packmule.checkpoint.head import Progress
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.store import StateStore
from packmule.engine.engine import Engine, Needs
from packmule.graph.costs import Costs
from packmule.graph.model import PLANES, PlannedModel
from packmule.kernels.contract import Kernels
from packmule.models.llama import TokenBatch
from packmule.models.views import TORCH_DTYPES
from packmule.optim.adamw import AdamW, Update
from packmule.optim.schedules import learning_rate
from packmule.shapes.bodies import DTYPES
from packmule.shapes.model import ModelShape
from packmule.spec.batch import IGNORED, Batch
from packmule.spec.plan import (
    CheckpointPlan,
    Io,
    Numerics,
    OptimizerNumerics,
    Placement,
    Plan,
    ScheduleNumerics,
)
from packmule.tiers.disk import Disk, PosixDisk
from tests.parity.plain import PlainModel, plain_step

COSTS = Costs(1e11, 4e10, 1e10, 1e9, 1e9, 1e-4, 1e-5)


def tiny_shape(tied: bool, layers: int = 2) -> ModelShape:
    """Odd sizes on purpose: pads everywhere."""
    return ModelShape(
        vocab=97, hidden=24, layers=layers, heads=4, kv_heads=2, head_dim=6, ffn=40,
        norm_eps=1e-5, rope_theta=1e4, tied=tied, max_positions=64,
    )  # fmt: skip


def make_plan(
    precision: str = "bf16-mixed",
    micro_rows: tuple[int, ...] = (2,),
    clip: float | None = 1.0,
    placement: Placement | None = None,
    order: str = "breadth",
    recompute: tuple[bool, ...] = (True, True),
    update: str = "after-backward",
    prefetch: int = 1,
    steps: int = 6,
    commit_steps: int = 1,
    chunk_bytes: int = 4096,
    length: int = 32,
    loss_chunk: int = 24,
) -> Plan:
    """A plan with small chunks, so that even tiny blocks stream in pieces."""
    return Plan(
        budget_bytes=1 << 30,
        numerics=Numerics(
            precision=precision, micro_rows=micro_rows, max_seq_length=length, loss_chunk=loss_chunk, clip=clip,
            optimizer=OptimizerNumerics(), seed=0, threads=2, kernels="native", torch=torch.__version__,
            schedule=ScheduleNumerics(kind="cosine", learning_rate=1e-2, warmup_steps=2, total_steps=steps),
            cpu_features=(),
        ),
        placement=placement or Placement(state="ram", weights="state"),
        order=order, recompute=recompute, update=update,
        io=Io(prefetch=prefetch, chunk_bytes=chunk_bytes),
        checkpoint=CheckpointPlan(commit_steps=commit_steps, snapshot_steps=None),
    )  # fmt: skip


def make_rows(rng: random.Random, vocab: int, length: int) -> list[list[int]]:
    """One row: documents of random lengths that fill at most `length` tokens."""
    row, left = [], rng.randint(length // 2, length)
    while left > 0:
        size = min(left, rng.randint(1, length))
        row.append([rng.randrange(vocab) for _ in range(size)])
        left -= size
    return row


def make_batch(rows: Sequence[list[list[int]]]) -> Batch:
    """The rows as one micro-batch."""
    documents = [document for row in rows for document in row]
    ids = [token for document in documents for token in document]
    targets = [t for document in documents for t in [*document[1:], IGNORED]]
    positions = [p for document in documents for p in range(len(document))]
    return Batch(
        np.array(ids, np.int64), np.array(targets, np.int64), np.array(positions, np.int32),
        tuple(len(document) for document in documents),
    )  # fmt: skip


class Data:
    """The same rows for every step of a seed, however they are cut."""

    def __init__(self, seed: int, plan: Plan, vocab: int) -> None:
        self.seed, self.numerics, self.vocab = seed, plan.numerics, vocab

    def batches(self, step: int) -> list[Batch]:
        rng = random.Random(f"{self.seed} {step}")
        rows = [make_rows(rng, self.vocab, self.numerics.max_seq_length) for _ in range(self.numerics.rows)]
        found, start = [], 0
        for count in self.numerics.micro_rows:
            found.append(make_batch(rows[start : start + count]))
            start += count
        return found

    @staticmethod
    def targets(batches: Sequence[Batch]) -> int:
        return sum(int((batch.targets != IGNORED).sum()) for batch in batches)


def progress(plan: Plan, step: int) -> Progress:
    """What a commit after `step` steps records."""
    return Progress(
        step=step, cursor=step * plan.numerics.rows, tokens=0, numerics=plan.numerics, job_hash="test", model={}
    )


def open_store(folder: Path, shape: ModelShape, plan: Plan, kernels: Kernels, disk: Disk) -> StateStore:
    """The run's state; not loaded."""
    dtype = DTYPES[plan.numerics.precision].master
    layout = StateLayout.of(shape.blocks(), PLANES, dtype, plan.io.chunk_bytes)
    return StateStore(disk, folder, layout, kernels.crc32c)


def start_run(folder: Path, model: PlainModel, plan: Plan, kernels: Kernels, disk: Disk | None = None) -> None:
    """Write a plain model's parameters as step 0 of a run."""
    store = open_store(folder, model.shape, plan, kernels, disk or PosixDisk())
    store.create_files()
    for block in model.blocks:
        store.begin(block.index)
        place = block.layout(model.types.master)
        plane = bytearray(place.bytes)
        for entry in place.entries:
            value = model.params[block.index][entry.name].contiguous().view(torch.uint8).flatten()
            plane[entry.offset : entry.offset + entry.bytes] = value.numpy().tobytes()
        pieces = store.layout.pieces(block.index)
        from packmule.tiers.disk import aligned_buffer

        buffer = aligned_buffer(plan.io.chunk_bytes)
        for index, chunk in enumerate(store.layout.chunks(block.index)):
            data = bytes(plane[chunk.start : chunk.start + chunk.bytes]) if index < pieces else bytes(chunk.bytes)
            buffer[: chunk.bytes] = data
            store.write(block.index, index, buffer[: chunk.bytes])
        store.end(block.index)
    store.commit(progress(plan, 0))
    store.close()


def open_engine(
    folder: Path, shape: ModelShape, plan: Plan, kernels: Kernels, disk: Disk | None = None, needs: Needs | None = None
) -> tuple[Engine, int]:
    """Engine loaded from the last commit, and that commit's step."""
    disk = disk or PosixDisk()
    store = open_store(folder, shape, plan, kernels, disk)
    head = store.load()
    assert head is not None
    engine = Engine(
        PlannedModel(shape, plan), kernels, store, disk, folder, COSTS, needs or Needs(), poison=True
    )
    engine.load()
    return engine, head.step


def run_steps(engine: Engine, data: Data, first: int, last: int, commit_steps: int = 1) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps first..last-1; settled at the end."""
    plan = engine.model.plan
    trace = []
    for step in range(first, last):
        batches = data.batches(step)
        update = Update(step + 1, learning_rate(plan.numerics.schedule, step))
        result = engine.step(
            batches, data.targets(batches), update, progress(plan, step + 1), commit=(step + 1) % commit_steps == 0
        )
        trace.append((result.loss, result.grad_norm))
    engine.settle(progress(plan, last))
    return trace


def state_bytes(folder: Path, shape: ModelShape, plan: Plan, kernels: Kernels, disk: Disk | None = None) -> tuple[int, list[bytes]]:
    """(step, every plane of every block) of the last commit, verified."""
    from packmule.tiers.disk import aligned_buffer

    store = open_store(folder, shape, plan, kernels, disk or PosixDisk())
    head = store.load()
    assert head is not None
    found = []
    for block in shape.blocks():
        planes = bytearray()
        for index, chunk in enumerate(store.layout.chunks(block.index)):
            buffer = aligned_buffer(chunk.bytes)
            store.read(block.index, index, buffer)
            planes += bytes(buffer)
        found.append(bytes(planes))
    store.close()
    return head.step, found


def plain_run(model: PlainModel, plan: Plan, data: Data, steps: int, kernels: Kernels) -> tuple[list[tuple[float, float]], list[bytes]]:
    """The same run as a plain loop: every tensor resident, one after the other."""
    numerics, types = plan.numerics, model.types
    rule = AdamW(numerics.optimizer)
    moments = [
        {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in named.items()}
        for named in model.params
    ]
    trace = []
    for step in range(steps):
        batches = data.batches(step)
        capacity = None
        loss, grads = plain_step(
            model, [TokenBatch.from_batch(batch) for batch in batches],
            chunk=numerics.loss_chunk, capacity=capacity or max(numerics.micro_tokens),
        )  # fmt: skip
        square = 0.0
        for block, named in zip(model.blocks, grads, strict=True):
            for p in block.parameters:
                square += kernels.sum_squares(named[p.name])
        total = math.sqrt(square)
        factor = 1.0 if numerics.clip is None else min(1.0, numerics.clip / (total + 1e-6))
        update = Update(step + 1, learning_rate(numerics.schedule, step), factor)
        for block, named, gradient, states in zip(model.blocks, model.params, grads, moments, strict=True):
            for p in block.parameters:
                planes = [named[p.name].view(-1), *(m.view(-1) for m in states[p.name])]
                rule.apply(kernels, update, p.role, planes, gradient[p.name].view(-1), None)
        trace.append((loss, total))
    images = []
    for block, named, states in zip(model.blocks, model.params, moments, strict=True):
        place = block.layout(types.master)
        image = bytearray(3 * place.bytes)
        for entry in place.entries:
            values = (named[entry.name], *states[entry.name])
            for number, value in enumerate(values):
                low = number * place.bytes + entry.offset
                data_bytes = value.contiguous().view(torch.uint8).flatten().numpy().tobytes()
                image[low : low + entry.bytes] = data_bytes
        images.append(bytes(image))
    return trace, images


