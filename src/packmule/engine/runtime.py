"""Runtime: what task bodies act on: arena, files, kernels, layouts, and the step under way."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from packmule.checkpoint.head import Progress
from packmule.checkpoint.reader import Place, StateReader
from packmule.checkpoint.snapshots import SnapshotWriter, rotate, snapshot_path
from packmule.checkpoint.store import StateStore
from packmule.errors import DiskError
from packmule.graph.kinds import Tier
from packmule.graph.model import PlannedModel
from packmule.kernels.contract import Kernels
from packmule.models.context import Decoder, TokenBatch
from packmule.models.views import views
from packmule.optim.noise import Noise, estimate
from packmule.optim.rule import Update
from packmule.optim.rules import rule_of
from packmule.shapes.layout import Layout, TensorSpec, layout
from packmule.shapes.state import FACTORS, plane_layout
from packmule.spec.tally import Tally
from packmule.tiers.arena import Arena
from packmule.tiers.device import Device
from packmule.tiers.disk import Disk, Handle

if TYPE_CHECKING:
    from packmule.engine.program import Range
    from packmule.models.modules.bodies import ModuleBodies

WORK_NAME = "work.bin"

Specs = Callable[..., tuple[TensorSpec, ...]]
"""A function of packmule.shapes.bodies that lists saved or scratch tensors."""


@dataclass(frozen=True)
class Outcome:
    """What a step comes to.

    Attributes:
        loss: mean over the targets of the global batch.
        targets: how many.
        grad_norm: before clipping.
        noise: for the gradient noise scale, where there are several micro-batches.
        balance: the load-balancing loss of layers with experts, before its factor; None without.
    """

    loss: float
    targets: int
    grad_norm: float
    noise: Noise | None
    balance: float | None


@dataclass(frozen=True)
class Ahead:
    """A step that is updated before its clip factor is known.

    Attributes:
        update: what its updates share.
        progress: what its commit records.
    """

    update: Update
    progress: Progress


@dataclass
class StepState:
    """The step (or evaluation, or generation) that bodies work on now.

    Attributes:
        batches: one per micro-batch, as `Runtime.prepare` makes them.
        number: of the step under way, from 1 on; None where nothing is trained.
        capacities: most tokens of each micro-batch, as planned.
        scale: 1 / targets of the global batch.
        update: what this step's updates share; for on-fetch, what the step before left pending.
        progress: what a commit in this graph records.
        ahead: in a graph that speculates, the step under way.
        validated: that step needed no clipping and is durable.
        stores: what this graph updates is stored, by it or by the next one.
        unverified: by place in the arena, the chunks of state that were read and not summed yet.
        position, positions: tokens in the cache so far and at most, when generating.
        losses: per micro-batch, (sum of losses, targets).
        balance: the load-balancing loss, not multiplied by its factor; None where there is none.
        tallies: per micro-batch of an evaluation.
        token_bytes: int32 [V], bytes of text that tokens stand for, where known; for evaluations.
        norms: per block, the sums of squares of its gradients, in parameter order.
        noise: per micro-batch, squared norm of what it added to the gradients of norm weights.
        norm_weights: per block, the squares of these gradients when they are complete.
    """

    batches: list[Any] = field(default_factory=list)
    number: int | None = None
    capacities: tuple[int, ...] = ()
    scale: float = 1.0
    update: Update | None = None
    progress: Progress | None = None
    ahead: Ahead | None = None
    validated: bool = False
    stores: bool = False
    unverified: dict[int, Place] = field(default_factory=dict)
    position: int = 0
    positions: int = 0
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    balance: float | None = None
    tallies: dict[int, Tally] = field(default_factory=dict)
    token_bytes: Tensor | None = None
    norms: dict[int, list[float]] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    norm_weights: dict[int, float] = field(default_factory=dict)

    def outcome(self) -> Outcome:
        """What the step comes to, once its last gradient's norm is known."""
        total = targets = 0.0
        for micro in sorted(self.losses):
            loss, count = self.losses[micro]
            total, targets = total + loss, targets + count
        parts = [(self.noise[micro], self.losses[micro][1]) for micro in sorted(self.noise)]
        whole = sum((self.norm_weights[block] for block in sorted(self.norm_weights)), 0.0)
        noise = estimate(parts, whole)
        return Outcome(total * self.scale, int(targets), math.sqrt(self.square), noise, self.balance)

    @property
    def square(self) -> float:
        """Squared global gradient norm, tensors in block order."""
        total = 0.0
        for block in sorted(self.norms):
            for value in self.norms[block]:
                total += value
        return total


class Runtime:
    """Shared by all graphs of a run.

    Args:
        model: shapes and plan.
        kernels: compute kernels.
        store: the run's state.
        disk: where work.bin lies.
        folder: of work.bin.
        arena: at least as large as the largest graph's extent.
        work_bytes: size of work.bin; 0: none is needed.
        positions: of a generated text, which may be longer than a row.
        modules: the user's own, where the model is made of them.
        device: what computes, where the plan has one.
        device_bytes: of its memory, at least as large as the largest graph's extent there.

    Attributes:
        memory: uint8, by tier, what buffers lie in: the arena, and a device's.
        kernels, near_kernels: those of the cores, and of what computes the model.
        sums: by block and chunk, what state in RAM sums to as its last update or load left it, where that
            was taken.
    """

    def __init__(
        self,
        model: PlannedModel,
        kernels: Kernels,
        store: StateStore | StateReader,
        disk: Disk,
        folder: Path,
        arena: Arena,
        work_bytes: int,
        positions: int = 0,
        modules: ModuleBodies | None = None,
        device: Device | None = None,
        device_bytes: int = 0,
    ) -> None:
        numerics = model.plan.numerics
        self.model = model
        self.kernels = kernels
        self.store = store
        self.disk = disk
        self.arena = arena
        self.memory = {Tier.RAM: torch.frombuffer(arena.memory, dtype=torch.uint8)}
        self._device = device
        self.near_kernels = kernels
        if device is not None:
            self.memory[Tier.DEVICE] = device.allocate(device_bytes)
            device.pin(arena.memory)
            self.near_kernels = device.kernels(kernels)
        self._decoder: Decoder | None = None
        self._modules = modules
        if modules is None:
            longest = max(numerics.max_seq_length, positions)
            self._decoder = Decoder.create(self.near_kernels, model.decoder, model.types, longest, self.place)
        self.rule = rule_of(numerics.optimizer)
        self.state = StepState()
        self.sums: dict[tuple[int, int], int] = {}
        self.weight_layouts = [block.layout(model.types.compute) for block in model.blocks]
        self.plane_layouts = [block.layout(model.types.master) for block in model.blocks]
        self.factor_layouts = [
            plane_layout(FACTORS, masters) if FACTORS in model.planes else None
            for masters in self.plane_layouts
        ]
        self._layouts: dict[tuple[Hashable, ...], Layout] = {}
        self._views: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self._work: Handle | None = None
        self._snapshot: SnapshotWriter | None = None
        self._whole: set[Path] = set()  # snapshots known to be complete
        self.snapshots: list[tuple[int, Path]] = []
        if work_bytes:
            path = folder / WORK_NAME
            if disk.exists(path):
                disk.remove(path)
            disk.create(path, work_bytes)
            self._work = disk.open(path, write=True)

    @property
    def device(self) -> Device:
        """What computes beside the cores."""
        if self._device is None:
            raise RuntimeError("this plan has no device")
        return self._device

    @property
    def place(self) -> str:
        """Where the model is computed, as torch calls it."""
        return "cpu" if self._device is None else self._device.torch_name

    @property
    def decoder(self) -> Decoder:
        """What a decoder's bodies share."""
        if self._decoder is None:
            raise RuntimeError("this model is made of a user's own modules")
        return self._decoder

    @property
    def modules(self) -> ModuleBodies:
        """What the bodies of a user's modules share."""
        if self._modules is None:
            raise RuntimeError("this model is a decoder")
        return self._modules

    def prepare(self, batch: Any) -> Any:
        """A micro-batch as bodies want it: a TokenBatch, or a SampleBatch in the compute dtype."""
        if self._modules is not None:
            return self._modules.batch(batch)
        return TokenBatch.from_batch(batch, self.place)

    @property
    def writable(self) -> StateStore:
        """The store, for updates and commits."""
        if not isinstance(self.store, StateStore):
            raise RuntimeError("this engine only reads")
        return self.store

    @property
    def snapshot(self) -> SnapshotWriter:
        """The snapshot under way."""
        if self._snapshot is None:
            raise RuntimeError("no snapshot has been begun")
        return self._snapshot

    @property
    def copying(self) -> bool:
        """Whether a snapshot has been begun and is not whole."""
        return self._snapshot is not None

    def begin_snapshot(self, step: int) -> None:
        """Make room for a snapshot of a step, unless that has been done.

        Raises:
            DiskError: there is none.
        """
        if self._snapshot is None:
            store = self.writable
            self._snapshot = SnapshotWriter(store, snapshot_path(store.folder, step))

    def end_snapshot(self) -> None:
        """All of a commit is in the snapshot under way: make it whole; older ones go."""
        store = self.writable
        path = self.snapshot.seal()
        self._snapshot = None
        kept, known = self.model.plan.checkpoint.snapshots_kept, {*self._whole, path}
        # What is read again here is read beside the cores' work, and Python's time is theirs.
        self._whole = set(rotate(store.disk, store.folder, kept, store.checksum, known))
        if store.head is not None:
            self.snapshots.append((store.head.step, path))

    @property
    def work(self) -> Handle:
        """work.bin."""
        if self._work is None:
            raise RuntimeError("this plan keeps nothing in work.bin")
        return self._work

    def layout(self, make: Specs, *arguments: Hashable) -> Layout:
        """The layout of `make(*arguments)`; made once."""
        key = (make, *arguments)
        if key not in self._layouts:
            self._layouts[key] = layout(make(*arguments))
        return self._layouts[key]

    def views(self, place: Range, layout: Layout, skip: int = 0) -> dict[str, Tensor]:
        """The tensors of a layout in a buffer, `skip` bytes after its start; made once, since graphs
        repeat."""
        begin = place.offset + skip
        key = (place.tier, begin, id(layout))
        if key not in self._views:
            self._views[key] = views(self.memory[place.tier][begin : begin + layout.bytes], layout)
        return self._views[key]

    def forget_views(self) -> None:
        """Let go of the views that graphs have asked for."""
        self._views.clear()

    def close(self) -> None:
        """Let go of files."""
        if self._work is not None:
            self.disk.close(self._work)
            self._work = None
        if self._snapshot is not None:
            with suppress(DiskError):
                self._snapshot.abandon()  # cut off: the resumed run makes it from the commit
            self._snapshot = None
        self.store.close()
        if self._device is not None:
            self._device.close()
