"""Small runs: a planned model on a disk through the engine, and the same run as a plain loop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from tests.parity.plain import TYPES, PlainModel, plain_step, precision_of

from packmule.checkpoint.head import Progress
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.snapshots import snapshot_path, snapshots
from packmule.checkpoint.store import StateStore
from packmule.engine.engine import Engine, Needs
from packmule.engine.program import Program
from packmule.graph.costs import Costs, DeviceCosts
from packmule.graph.model import PlannedModel
from packmule.graph.run import Maker, run_graphs
from packmule.graph.step import StepGraph
from packmule.kernels.contract import Kernels
from packmule.models.context import TokenBatch
from packmule.optim.rules import rule_of
from packmule.optim.schedules import update_at
from packmule.shapes.bodies import DTYPES
from packmule.shapes.groups import groups_of
from packmule.shapes.model import ModelShape
from packmule.shapes.state import FACTORS, STATES, factors, plane_layout
from packmule.spec.batch import IGNORED, Batch
from packmule.spec.growth import Growth, rows_at, rows_before
from packmule.spec.plan import (
    CheckpointPlan,
    DevicePlan,
    Io,
    Numerics,
    OptimizerNumerics,
    Placement,
    Plan,
    ScheduleNumerics,
)
from packmule.spec.timeline import Timeline
from packmule.spec.turns import Turns
from packmule.tiers.device import FakeDevice
from packmule.tiers.disk import Disk, PosixDisk, aligned_buffer

_CORES = Costs(1e11, 4e10, 1e10, 1e9, 1e9, 1e-3, 1e-4, 1e-5)
COSTS = replace(_CORES, device=DeviceCosts(replace(_CORES, matmul_flops=1e12), 2e9, 2e9))

HIFT = Turns(method="hift", layers=1, order="random")
BADAM = Turns(method="badam", layers=2, steps=2, order="descending")
"""Active-block schedules of which some steps are more than a cycle or a turn."""

Trace = list[tuple[float, float]]
"""(loss, gradient norm) per step."""

Moments = list[dict[str, tuple[torch.Tensor, ...]]]
"""Per block, parameter name -> its state but the master: (m, v) of AdamW, (rows, columns) of AdaLomo."""

Image = list[bytes]
"""Every plane of every block."""


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
    snapshot_steps: int | None = None,
    snapshots_kept: int = 2,
    chunk_bytes: int = 4096,
    length: int = 32,
    loss_chunk: int = 24,
    schedule: Mapping[str, object] | None = None,
    optimizer: Mapping[str, object] | None = None,
    growth: Growth | None = None,
    vocabulary_parts: int = 1,
    turns: Turns | None = None,
    device: bool = False,
    device_updates: int = 0,
    speculate: bool = False,
) -> Plan:
    """A plan with small chunks, so that even tiny blocks stream in pieces."""
    types = TYPES[precision]
    return Plan(
        budget_bytes=1 << 30,
        numerics=Numerics(
            precision="bf16-mixed" if types.widens else precision,
            products="float32" if types.widens else None,
            micro_rows=micro_rows, max_seq_length=length, loss_chunk=loss_chunk,
            clip=clip, optimizer=OptimizerNumerics(**(optimizer or {})), seed=0, threads=1, kernels="native",
            torch=torch.__version__,
            schedule=ScheduleNumerics(
                **{"learning_rate": 1e-2, "warmup_steps": 2, "total_steps": steps, **(schedule or {})}
            ),
            cpu_features=(), growth=growth, vocabulary_parts=vocabulary_parts, turns=turns,
        ),
        placement=placement or Placement(state="ram", weights="state"),
        device=DevicePlan(name="fake", memory_bytes=1 << 30) if device else None,
        device_updates=device_updates, order=order, recompute=recompute, update=update, speculate=speculate,
        io=Io(prefetch=prefetch, chunk_bytes=chunk_bytes),
        checkpoint=CheckpointPlan(
            commit_steps=commit_steps, snapshot_steps=snapshot_steps, snapshots_kept=snapshots_kept
        ),
    )  # fmt: skip


# Data


def make_row(rng: random.Random, vocab: int, length: int) -> list[list[int]]:
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

    def __init__(self, seed: int, vocab: int) -> None:
        self.seed, self.vocab = seed, vocab

    def rows(self, step: int, count: int, length: int) -> list[list[list[int]]]:
        """The global batch of one step."""
        rng = random.Random(f"{self.seed} {step}")
        return [make_row(rng, self.vocab, length) for _ in range(count)]

    def batches(self, step: int, numerics: Numerics) -> list[Batch]:
        """One per micro-batch."""
        size = rows_at(numerics.growth, numerics.rows, step)
        rows = self.rows(step, size, numerics.max_seq_length)
        found, start = [], 0
        for count in numerics.cut(size):
            found.append(make_batch(rows[start : start + count]))
            start += count
        return found


def count_targets(batches: Sequence[Batch]) -> int:
    """Targets that carry loss."""
    return sum(int((batch.targets != IGNORED).sum()) for batch in batches)


# State on disk


def planes_of(numerics: Numerics) -> tuple[str, ...]:
    """The names of a rule's planes."""
    return STATES[numerics.optimizer.rule].planes


def progress(plan: Plan, step: int) -> Progress:
    """What a commit after `step` steps records."""
    return Progress(
        step=step,
        cursor=rows_before(plan.numerics.growth, plan.numerics.rows, step),
        tokens=0,
        numerics=plan.numerics,
        job_hash="test",
        model={},
    )


def open_store(folder: Path, shape: ModelShape, plan: Plan, kernels: Kernels, disk: Disk) -> StateStore:
    """The run's state; not loaded."""
    dtype = DTYPES[plan.numerics.precision].master
    layout = StateLayout.of(shape.blocks(), planes_of(plan.numerics), dtype, plan.io.chunk_bytes)
    return StateStore(disk, folder, layout, kernels.crc32c)


def start_run(
    folder: Path, model: PlainModel, plan: Plan, kernels: Kernels, disk: Disk | None = None
) -> None:
    """Write a plain model's parameters as step 0 of a run."""
    store = open_store(folder, model.shape, plan, kernels, disk or PosixDisk())
    store.create_files()
    buffer = aligned_buffer(plan.io.chunk_bytes)
    for block, image in enumerate(image_of(model, plan.numerics)):
        store.begin(block)
        at = 0
        for index, chunk in enumerate(store.layout.chunks(block)):
            buffer[: chunk.bytes] = image[at : at + chunk.bytes]
            store.write(block, index, buffer[: chunk.bytes])
            at += chunk.bytes
        store.end(block)
    store.commit(progress(plan, 0))
    store.close()


def state_bytes(
    folder: Path, shape: ModelShape, plan: Plan, kernels: Kernels, disk: Disk | None = None
) -> tuple[int, Image]:
    """(step, state) of the last commit, verified."""
    return read_state(open_store(folder, shape, plan, kernels, disk or PosixDisk()), len(shape.blocks()))


def read_state(store: StateStore, blocks: int) -> tuple[int, Image]:
    """(step, every plane of every block) of the last commit, verified; the store is closed."""
    head = store.load()
    assert head is not None and blocks == len(store.layout.blocks)
    found = read_planes(store)
    store.close()
    return head.step, found


def read_planes(source: StateStore | StateReader) -> Image:
    """Every plane of every block, verified."""
    found = []
    buffer = aligned_buffer(source.layout.chunk_bytes)
    for block in range(len(source.layout.blocks)):
        planes = bytearray()
        for index, chunk in enumerate(source.layout.chunks(block)):
            source.read(block, index, buffer)
            planes += buffer[: chunk.bytes]
        found.append(bytes(planes))
    return found


# The engine


def open_engine(
    folder: Path,
    shape: ModelShape,
    plan: Plan,
    kernels: Kernels,
    disk: Disk | None = None,
    needs: Needs | None = None,
    prepare: Callable[[Engine], None] | None = None,
    device: FakeDevice | None = None,
    graphs: Callable[..., dict[str, Maker]] = run_graphs,
) -> tuple[Engine, int]:
    """Engine loaded from the last commit, and that commit's step.

    Args:
        prepare: called before the load.
        device: what computes where the plan has a device; one as fast as memory by default.
        graphs: stands for `run_graphs`.
    """
    disk = disk or PosixDisk()
    store = open_store(folder, shape, plan, kernels, disk)
    head = store.load()
    assert head is not None
    with patch("packmule.engine.engine.run_graphs", graphs):
        engine = Engine(
            PlannedModel(shape, plan),
            kernels,
            store,
            disk,
            folder,
            COSTS,
            needs or Needs(),
            poison=True,
            device=(device or FakeDevice()) if plan.device else None,
        )
    if prepare:
        prepare(engine)
    engine.load()
    return engine, head.step


def step_engine(
    engine: Engine, data: Data, step: int, stopping: Callable[[], bool] | None = None
) -> tuple[float, float]:
    """Run step number `step` (0 for the first), committing as the plan says; its trace."""
    plan = engine.model.plan
    batches = data.batches(step, plan.numerics)
    update = update_at(plan.numerics, len(engine.model.groups), step)
    kept = keeps(plan, step + 1)
    commit = kept or (step + 1) % plan.checkpoint.commit_steps == 0
    targets, after = count_targets(batches), progress(plan, step + 1)
    result = engine.step(batches, targets, update, after, commit, snapshot=kept, stopping=stopping)
    return result.outcome.loss, result.outcome.grad_norm


def keeps(plan: Plan, step: int) -> bool:
    """Whether a snapshot is taken of a step."""
    every = plan.checkpoint.snapshot_steps
    return every is not None and step % every == 0


def run_steps(engine: Engine, data: Data, first: int, last: int) -> Trace:
    """The trace of steps first..last-1; settled at the end."""
    trace = [step_engine(engine, data, step) for step in range(first, last)]
    engine.settle(progress(engine.model.plan, last))
    return trace


def watch(engine: Engine, run: Callable[[str, Program, dict], Timeline]) -> None:
    """Have every execution of a program go through `run(name, program, arguments)`."""
    for name, program in engine.programs.items():
        engine.programs[name] = _Watched(name, program, run)  # type: ignore[assignment]


class _Watched:
    """A program whose executions are seen."""

    def __init__(self, name: str, program: Program, run: Callable[[str, Program, dict], Timeline]) -> None:
        self._name, self._program, self._run = name, program, run

    @property
    def graph(self) -> StepGraph:
        return self._program.graph

    @property
    def touched(self) -> bool:
        return self._program.touched

    def forget(self) -> None:
        self._program.forget()

    def run(self, **arguments: object) -> Timeline:
        return self._run(self._name, self._program, arguments)


# The plain loop


@dataclass(frozen=True)
class PlainRun:
    """A run as a plain loop.

    Attributes:
        trace: of each step.
        images: the state after 0, 1, ... steps.
        moments: per block, parameter name -> its planes but the master, at the end.
    """

    trace: Trace
    images: list[Image]
    moments: Moments


def plain_run(model: PlainModel, numerics: Numerics, data: Data, steps: int, kernels: Kernels) -> PlainRun:
    """Every tensor resident, one task after the other. Changes `model.params`."""
    rule, moments = rule_of(numerics.optimizer), no_moments(model, numerics)
    groups = () if numerics.turns is None else groups_of(model.blocks, numerics.turns)
    trace, images = [], [image_of(model, numerics)]
    for step in range(steps):
        batches = [TokenBatch.from_batch(batch) for batch in data.batches(step, numerics)]
        loss, grads = plain_step(model, batches, numerics.loss_chunk, capacity=max(numerics.micro_tokens))
        update = update_at(numerics, len(groups), step)
        active = [model.blocks[b] for b in groups[update.group]] if groups else model.blocks
        square = 0.0
        for block in active:
            for p in block.parameters:
                square += kernels.sum_squares(grads[block.index][p.name])
        total = math.sqrt(square)
        factor = 1.0 if numerics.clip is None else min(1.0, numerics.clip / (total + 1e-6))
        update = replace(update, factor=factor)
        for block in active:
            for p in block.parameters:
                others = moments[block.index][p.name]
                if update.age == 1:
                    for plane in others:
                        plane.zero_()
                planes = [model.params[block.index][p.name].view(-1), *(m.view(-1) for m in others)]
                gradient = grads[block.index][p.name].view(-1)
                rule.apply(kernels, update, p.role, planes, gradient, None)
        trace.append((loss, total))
        images.append(image_of(model, numerics, moments))
    return PlainRun(trace, images, moments)


def no_moments(model: PlainModel, numerics: Numerics) -> Moments:
    """As they are before the first step."""

    def of(name: str, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if FACTORS not in planes_of(numerics):
            return tuple(torch.zeros_like(value) for _ in planes_of(numerics)[1:])
        sizes = [spec.numel for spec in factors(name, tuple(value.shape), model.types.master)]
        return tuple(torch.zeros(size, dtype=value.dtype) for size in sizes)

    return [{name: of(name, value) for name, value in named.items()} for named in model.params]


def image_of(model: PlainModel, numerics: Numerics, moments: Moments | None = None) -> Image:
    """What state.bin should hold; moments are zero when left out."""
    moments = moments or no_moments(model, numerics)
    images = []
    for block, named in zip(model.blocks, model.params, strict=True):
        place, image = block.layout(model.types.master), bytearray()
        for number, plane in enumerate(planes_of(numerics)):
            entries = plane_layout(plane, place)
            # A plane in factors has some tensors per parameter, another has one.
            states = [moments[block.index][entry.name] for entry in place.entries]
            if number == 0:
                values = [named[entry.name] for entry in place.entries]
            elif plane == FACTORS:
                values = [value for state in states for value in state]
            else:
                values = [state[number - 1] for state in states]
            start = len(image)
            image += bytes(entries.bytes)
            for entry, value in zip(entries.entries, values, strict=True):
                low = start + entry.offset
                image[low : low + entry.bytes] = bits(value)
        images.append(bytes(image))
    return images


def bits(value: torch.Tensor) -> bytes:
    """A tensor's memory."""
    return value.contiguous().view(torch.uint8).flatten().numpy().tobytes()


@dataclass(frozen=True)
class Case:
    """One run and what it must come to."""

    shape: ModelShape
    plan: Plan
    data: Data
    model_seed: int
    expected: PlainRun
    _graphs: dict[tuple[object, ...], dict[str, Maker]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def steps(self) -> int:
        """How many the plain loop ran."""
        return len(self.expected.trace)

    def model(self, kernels: Kernels) -> PlainModel:
        """As it is before the first step."""
        numerics = self.plan.numerics
        return PlainModel(
            self.shape, precision_of(numerics), self.model_seed, kernels, positions=numerics.max_seq_length
        )

    def start(self, folder: Path, kernels: Kernels, disk: Disk | None = None) -> None:
        """Write step 0."""
        start_run(folder, self.model(kernels), self.plan, kernels, disk)

    def open(
        self,
        folder: Path,
        kernels: Kernels,
        disk: Disk | None = None,
        prepare: Callable[[Engine], None] | None = None,
        needs: Needs | None = None,
        device: FakeDevice | None = None,
    ) -> tuple[Engine, int]:
        """As `open_engine`."""
        return open_engine(
            folder, self.shape, self.plan, kernels, disk, needs, prepare, device, self._graphs_once
        )

    def _graphs_once(self, model: PlannedModel, costs: Costs, *needs: object) -> dict[str, Maker]:
        """As `run_graphs`, each built once however often an engine is opened: shape, plan and costs are the
        same, and to build them takes as long as some of their steps."""
        if needs not in self._graphs:
            makers = run_graphs(model, costs, *needs)  # type: ignore[arg-type]
            self._graphs[needs] = {name: cache(make) for name, make in makers.items()}
        return self._graphs[needs]

    def state(self, folder: Path, kernels: Kernels, disk: Disk | None = None) -> tuple[int, Image]:
        """As `state_bytes`."""
        return state_bytes(folder, self.shape, self.plan, kernels, disk)

    def snapshots(self, folder: Path, kernels: Kernels, disk: Disk | None = None) -> list[int]:
        """Steps of the snapshots that are whole; each holds the state after its step, as HEAD.json says."""
        disk, found = disk or PosixDisk(), []
        for path in snapshots(disk, folder, kernels.crc32c):
            with StateReader.open(disk, path, kernels.crc32c) as reader:
                step = reader.head.step
                assert path == snapshot_path(folder, step)
                kept = {name: getattr(reader.head, name) for name in Progress.model_fields}
                assert Progress(**kept) == progress(self.plan, step)
                assert read_planes(reader) == self.expected.images[step], path.name
                found.append(step)
        return found

    def kept(self, last: int) -> list[int]:
        """Steps of the snapshots that there are when a run has ended with step `last`."""
        due = [step for step in range(1, last + 1) if keeps(self.plan, step)]
        return due[-self.plan.checkpoint.snapshots_kept :]


def make_case(shape: ModelShape, plan: Plan, steps: int, seed: int, kernels: Kernels) -> Case:
    """Run the plain loop for a plan's numerics, with data and parameters from one seed."""
    shape = shape.cut(plan.numerics.vocabulary_parts)
    data = Data(seed, shape.vocab)
    model = PlainModel(
        shape, precision_of(plan.numerics), seed, kernels, positions=plan.numerics.max_seq_length
    )
    return Case(shape, plan, data, seed, plain_run(model, plan.numerics, data, steps, kernels))


def finish(case: Case, folder: Path, kernels: Kernels, disk: Disk | None = None) -> tuple[int, Trace]:
    """Resume a run and carry it to its end: (step it resumed from, its trace from there)."""
    engine, step = case.open(folder, kernels, disk)
    trace = run_steps(engine, case.data, step, case.steps)
    engine.close()
    return step, trace
