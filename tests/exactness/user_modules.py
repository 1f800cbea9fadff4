"""A user's model in small, and a step of it as a plain torch loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.exactness.runs import COSTS, Trace, progress, read_state
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.store import StateStore
from packmule.engine.engine import Engine, Needs
from packmule.graph.model import PlannedModel
from packmule.kernels.contract import Kernels
from packmule.models.modules.bodies import ModuleBodies
from packmule.models.modules.build import Part, UserModel, build
from packmule.models.modules.samples import Draw, SampleBatch, Samples
from packmule.models.views import TORCH_DTYPES
from packmule.optim.adamw import AdamW
from packmule.optim.schedules import update_at
from packmule.shapes.bodies import DTYPES
from packmule.shapes.groups import groups_of
from packmule.shapes.module import Cost, ModulePart, ModuleShape, TensorRecord
from packmule.shapes.state import STATES
from packmule.spec.plan import Plan
from packmule.tiers.disk import Disk, PosixDisk, aligned_buffer

WIDTH, TOKENS, CLASSES = 12, 5, 7
Image = list[bytes]


class Embed(nn.Module):
    """[B, TOKENS, 3] to [B, TOKENS, WIDTH]; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, WIDTH)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("positions", torch.linspace(-1, 1, TOKENS)[:, None])

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.project(batch[0]) + self.positions


class Mix(nn.Module):
    """A convolution over tokens, in place of attention; parameters of every number of dimensions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.gain * self.dropout(F.gelu(mixed))


class Cut(nn.Module):
    """Half the tokens, and what the labels say: a block whose output is smaller and that sees the batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.labels = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(self.linear(x[:, : TOKENS // 2])) + 0.1 * self.labels(batch[1])[:, None]


class Head(nn.Module):
    """One loss per sample; and, if asked, whether the likeliest class is the right one."""

    def __init__(self, reports: bool = False) -> None:
        super().__init__()
        self.reports = reports
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, batch: tuple[Tensor, Tensor]) -> Any:
        logits = self.logits(self.norm(x.mean(1)))
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return (losses, {"accuracy": logits.argmax(-1) == batch[1]}) if self.reports else losses


def make(dropout: float = 0.0, lazy: bool = False, reports: bool = False) -> SimpleNamespace:
    """Two equal blocks, one that cuts, one more; as modules, or as functions that make them."""
    makers = [partial(Mix, dropout), partial(Mix, dropout), partial(Cut, dropout), partial(Mix, dropout)]
    if lazy:
        return SimpleNamespace(embed=Embed, blocks=makers, head=partial(Head, reports))
    return SimpleNamespace(embed=Embed(), blocks=nn.ModuleList(m() for m in makers), head=Head(reports))


class Points:
    """Sample `i` is always the same."""

    def __init__(self, seed: int, count: int = 23) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng((self.seed, index))
        return rng.standard_normal((TOKENS, 3)).astype(np.float32), int(rng.integers(CLASSES))


@dataclass(frozen=True)
class ModuleCase:
    """A user's model with what it starts from.

    Attributes:
        bodies: skeletons.
        masters: per block, its parameters as they were made.
    """

    shape: ModuleShape
    plan: Plan
    bodies: ModuleBodies
    masters: list[dict[str, Tensor]]
    samples: Samples

    @classmethod
    def of(
        cls, plan: Plan, seed: int, dropout: float = 0.0, lazy: bool = False, samples: Samples | None = None
    ) -> ModuleCase:
        """Build it as a run does."""
        types = DTYPES[plan.numerics.precision]
        masters: list[dict[str, Tensor]] = []

        def visit(index: int, part: Part) -> None:
            named = part.module.named_parameters()
            masters.append({n: p.detach().to(TORCH_DTYPES[types.master], copy=True) for n, p in named})

        factory = f"{__name__}:make"
        model = build(factory, {"dropout": dropout, "lazy": lazy}, seed, types.compute, visit)
        bodies = ModuleBodies(model, types, plan.numerics.seed)
        samples = samples or Samples(Points(seed), np.arange(23), plan.numerics.seed)
        shape = describe(model, masters, bodies, samples, plan.numerics.precision)
        return cls(shape, plan, bodies, masters, samples)

    def batches(self, step: int) -> list[SampleBatch]:
        """The micro-batches of a step."""
        numerics = self.plan.numerics
        ids = self.samples.numbers_at(step * numerics.rows, numerics.rows)
        found, start = [], 0
        for count in numerics.micro_rows:
            found.append(self.samples.micro_batch(ids[start : start + count]))
            start += count
        return found

    def store(self, folder: Path, kernels: Kernels, disk: Disk | None = None) -> StateStore:
        """The run's state; not loaded."""
        dtype = DTYPES[self.plan.numerics.precision].master
        layout = StateLayout.of(self.shape.blocks(), STATES["adamw"].planes, dtype, self.plan.io.chunk_bytes)
        return StateStore(disk or PosixDisk(), folder, layout, kernels.crc32c)

    def start(self, folder: Path, kernels: Kernels) -> None:
        """Write step 0."""
        store = self.store(folder, kernels)
        store.create_files()
        buffer = aligned_buffer(self.plan.io.chunk_bytes)
        for block, image in enumerate(image_of(self.shape, self.masters, None, store.layout.dtype)):
            store.begin(block)
            at = 0
            for index, chunk in enumerate(store.layout.chunks(block)):
                buffer[: chunk.bytes] = image[at : at + chunk.bytes]
                store.write(block, index, buffer[: chunk.bytes])
                at += chunk.bytes
            store.end(block)
        store.commit(progress(self.plan, 0))
        store.close()

    def open(
        self, folder: Path, kernels: Kernels, evaluation_rows: tuple[int, ...] = ()
    ) -> tuple[Engine, int]:
        """An engine at the last commit, and that commit's step."""
        store = self.store(folder, kernels)
        head = store.load()
        assert head is not None
        needs = Needs(evaluation_rows=evaluation_rows)
        engine = Engine(
            PlannedModel(self.shape, self.plan), kernels, store, PosixDisk(), folder, COSTS, needs,
            poison=True, modules=self.bodies,
        )  # fmt: skip
        engine.load()
        return engine, head.step

    def run(self, engine: Engine, first: int, last: int) -> Trace:
        """Steps first..last-1, settled at the end."""
        trace = []
        for step in range(first, last):
            update = update_at(self.plan.numerics, len(engine.model.groups), step)
            commit = (step + 1) % self.plan.checkpoint.commit_steps == 0
            done = engine.step(
                self.batches(step), self.plan.numerics.rows, update, progress(self.plan, step + 1), commit
            )
            trace.append((done.outcome.loss, done.outcome.grad_norm))
        engine.settle(progress(self.plan, last))
        return trace

    def state(self, folder: Path, kernels: Kernels) -> tuple[int, Image]:
        """(step, every plane of every block) of the last commit, verified."""
        return read_state(self.store(folder, kernels), len(self.masters))


def describe(
    model: UserModel,
    masters: list[dict[str, Tensor]],
    bodies: ModuleBodies,
    samples: Samples,
    precision: str,
) -> ModuleShape:
    """What the gauge would write, with made-up costs."""
    batch, x = bodies.batch(samples.micro_batch((0,))), None
    compute = TORCH_DTYPES[bodies.types.compute]
    parts = []
    for block, part in enumerate(model.parts):
        shape: tuple[int, ...] = ()
        if part.name != "head":
            weights = {name: value.to(compute) for name, value in masters[block].items()}
            x = bodies.forward(block, weights, x, batch, Draw(1, 0))
            shape = tuple(x.shape[1:])
        tensors = tuple(TensorRecord(name=p.name, shape=p.shape, role=p.role) for p in part.parameters)
        parts.append(ModulePart(name=part.name, kind=0, row_shape=shape, parameters=tensors))
    cost = Cost(rows=64, forward_bytes=1, backward_bytes=1, forward_seconds=1e-3, backward_seconds=2e-3)
    return ModuleShape(
        factory="tests:make", dataset="tests:Points", precision=precision, samples=len(samples),
        mean_targets=1.0, parts=tuple(parts), costs=((cost,),), build_bytes=0, resident_bytes=0,
    )  # fmt: skip


def image_of(
    shape: ModuleShape,
    masters: list[dict[str, Tensor]],
    moments: list[dict[str, tuple[Tensor, Tensor]]] | None,
    dtype: str,
) -> Image:
    """What state.bin should hold; moments are zero when left out."""
    images = []
    for block, named in zip(shape.blocks(), masters, strict=True):
        place = block.layout(dtype)
        image = bytearray(3 * place.bytes)
        for entry in place.entries:
            values = (named[entry.name], *(moments[block.index][entry.name] if moments else ()))
            for number, value in enumerate(values):
                low = number * place.bytes + entry.offset
                image[low : low + entry.bytes] = value.contiguous().view(-1).numpy().tobytes()
        images.append(bytes(image))
    return images


def plain_run(case: ModuleCase, steps: int, kernels: Kernels) -> tuple[Trace, list[Image]]:
    """Every step as anybody would write it: all blocks under one autograd graph, `loss.backward()`,
    gradients that add up over micro-batches; then the rule. Leaves the case as it was."""
    numerics, types = case.plan.numerics, case.bodies.types
    compute, wide = TORCH_DTYPES[types.compute], TORCH_DTYPES[types.gradient]
    masters = [{name: value.clone() for name, value in named.items()} for named in case.masters]
    moments = [{n: (torch.zeros_like(v), torch.zeros_like(v)) for n, v in m.items()} for m in masters]
    rule, blocks = AdamW(numerics.optimizer), case.shape.blocks()
    groups = groups_of(blocks, numerics.turns) if numerics.turns else ()
    trace, images = [], [image_of(case.shape, masters, moments, types.master)]
    for step in range(steps):
        update = update_at(numerics, len(groups), step)
        active = range(len(blocks)) if update.group is None else groups[update.group]
        grads = [{n: torch.zeros(v.shape, dtype=wide) for n, v in named.items()} for named in masters]
        total = 0.0
        for micro, batch in enumerate(case.batches(step)):
            leaves = [
                {n: v.to(compute, copy=True).requires_grad_(index in active) for n, v in named.items()}
                for index, named in enumerate(masters)
            ]
            with torch.enable_grad():
                losses = plain_losses(case, leaves, batch, Draw(step + 1, micro))
                (losses.sum() * (1.0 / numerics.rows)).backward()
            total += float(losses.detach().sum(dtype=torch.float64))
            for named, found in zip(leaves, grads, strict=True):
                for name, leaf in named.items():
                    if leaf.grad is not None:
                        found[name] += leaf.grad
        square = 0.0
        for index in active:
            for p in blocks[index].parameters:
                square += kernels.sum_squares(grads[index][p.name])
        norm = math.sqrt(square)
        factor = 1.0 if numerics.clip is None else min(1.0, numerics.clip / (norm + 1e-6))
        update = replace(update, factor=factor)
        for index in active:
            for p in blocks[index].parameters:
                planes = [masters[index][p.name].view(-1), *(m.view(-1) for m in moments[index][p.name])]
                rule.apply(kernels, update, p.role, planes, grads[index][p.name].view(-1), None)
        trace.append((total * (1.0 / numerics.rows), norm))
        images.append(image_of(case.shape, masters, moments, types.master))
    return trace, images


def plain_losses(
    case: ModuleCase, leaves: Sequence[dict[str, Tensor]], batch: SampleBatch, draw: Draw | None
) -> Tensor:
    """Embed, blocks, head in one graph; before each, torch's generator as the run seeds it. Between blocks
    x is contiguous, as it is in the run's buffers."""
    data = case.bodies.batch(batch).data
    x = None
    for block, (part, named) in enumerate(zip(case.bodies.model.parts, leaves, strict=True)):
        torch.manual_seed(case.bodies.draw_seed(block, draw))
        part.module.train(draw is not None)
        last = block == len(leaves) - 1
        inputs = (data,) if x is None else (x, data) if last or part.takes_batch else (x,)
        x = functional_call(part.module, named, inputs).contiguous()
    return x
