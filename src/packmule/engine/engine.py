"""Engine: the graphs of one run, executed: load, step, drain, commit, evaluate, generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packmule.checkpoint.head import Progress
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.store import StateStore
from packmule.engine.bodies import BODIES
from packmule.engine.module_bodies import MODULE_BODIES
from packmule.engine.program import POISON, Program
from packmule.engine.runtime import Ahead, Outcome, Runtime, StepState
from packmule.engine.updates import check_finite
from packmule.errors import DiskError
from packmule.graph.costs import Costs
from packmule.graph.kinds import BufferKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.run import (
    SNAPSHOT,
    SPECULATING,
    evaluation_batches,
    extents_of,
    fewer,
    grouped,
    inference_graphs,
    run_graphs,
)
from packmule.graph.simulate import simulate
from packmule.graph.step import StepGraph
from packmule.kernels.contract import Kernels
from packmule.models.decode import sample
from packmule.optim.rule import Update
from packmule.spec.batch import Batch
from packmule.spec.tally import Tally
from packmule.spec.timeline import Timeline
from packmule.tiers.arena import Arena
from packmule.tiers.device import Device
from packmule.tiers.disk import Disk, aligned_buffer

if TYPE_CHECKING:
    from torch import Tensor

    from packmule.models.modules.bodies import ModuleBodies

Stopping = Callable[[], bool]


@dataclass(frozen=True)
class Needs:
    """What a run will ask of its engine besides steps.

    Attributes:
        mean_length: tokens per document, weighted by tokens; only predictions depend on it.
        evaluation_rows: of each evaluation set.
        sample_tokens: positions of a generated text; 0: none.
        training: False only reads: the store may be a StateReader.
    """

    mean_length: float = 1.0
    evaluation_rows: tuple[int, ...] = ()
    sample_tokens: int = 0
    training: bool = True


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        outcome: what it came to.
        timeline: measured.
        graph: what was executed.
    """

    outcome: Outcome
    timeline: Timeline
    graph: StepGraph


@dataclass(frozen=True)
class _Pending:
    """What is left of a step for the graph of the next, where `Plan.commits_late`.

    Attributes:
        update: on-fetch: its gradients wait for the next forward.
        progress: what its commit records.
        commit: it is to be made durable.
        snapshot: and to be kept apart.
    """

    update: Update | None
    progress: Progress
    commit: bool
    snapshot: bool

    @property
    def name(self) -> str:
        """The graph of the step that does it."""
        return _named("step, commit" if self.commit else "step", self.snapshot)


def _named(graph: str, snapshot: bool) -> str:
    return f"{graph}{SNAPSHOT}" if snapshot else graph


class Engine:
    """One run's arena, programs and pending update.

    Args:
        model: shapes and plan.
        kernels: compute kernels.
        store: the run's state, with a commit loaded.
        disk, folder: where work.bin lies.
        costs: rates; only predictions depend on them.
        needs: which graphs are wanted.
        modules: the user's own, where the model is made of them.
        device: what computes, where the plan has one.
        poison: test mode: what is not written yet, or released, is NaN; addresses are checked.

    Attributes:
        expects_clip: where the plan speculates: the next gradient is taken to be clipped, as the last one
            was; of the first nothing is known.
    """

    def __init__(
        self,
        model: PlannedModel,
        kernels: Kernels,
        store: StateStore | StateReader,
        disk: Disk,
        folder: Path,
        costs: Costs,
        needs: Needs = Needs(),
        poison: bool = False,
        modules: ModuleBodies | None = None,
        device: Device | None = None,
    ) -> None:
        if (model.plan.device is None) != (device is None):
            raise ValueError("an engine has a device where its plan has one, and only there")
        self.model = model
        self.needs = needs
        make = run_graphs if needs.training else inference_graphs
        makers = make(model, costs, needs.mean_length, needs.evaluation_rows, needs.sample_tokens)
        bodies = BODIES if modules is None else {**BODIES, **MODULE_BODIES}
        extents = extents_of(make() for make in makers.values())
        self.arena = Arena(extents[Tier.RAM])
        self.runtime = Runtime(
            model,
            kernels,
            store,
            disk,
            folder,
            self.arena,
            extents[Tier.DISK],
            needs.sample_tokens,
            modules,
            device,
            extents[Tier.DEVICE],
        )
        for memory in self.runtime.memory.values() if poison else ():
            memory.fill_(POISON)
        self.programs = {name: Program(self.runtime, made, bodies, poison) for name, made in makers.items()}
        self._group = ""
        self._pending: _Pending | None = None
        self._committed = True
        self.expects_clip = True
        self._last: Progress | None = None
        self._running: Program | None = None
        self._failed = False

    def load(self, stopping: Stopping | None = None) -> Timeline:
        """Read and verify the last commit; fill what the plan keeps elsewhere."""
        store, chunk = self.runtime.store, self.model.plan.io.chunk_bytes
        if isinstance(store, StateStore) and store.layout.chunk_bytes != chunk:
            store.rechunk(chunk, aligned_buffer(max(chunk, store.layout.chunk_bytes)))
        self._pending = None
        self._committed = True
        self._state((), ())
        self.runtime.sums.clear()
        return self._run("load", stopping=stopping)

    def step(
        self,
        batches: Sequence[Batch],
        targets: int,
        update: Update,
        progress: Progress,
        commit: bool,
        *,
        snapshot: bool = False,
        stop_after: int | None = None,
        stopping: Stopping | None = None,
    ) -> StepResult:
        """One optimizer step.

        Args:
            batches: one per micro-batch of the plan, or of its first ones while the batch warms up.
            targets: targets of the global batch, counted beforehand.
            update: this step's number and learning rate.
            progress: what a commit after this step records.
            commit: make this step durable (in the next step, where `Plan.commits_late`).
            snapshot: keep a copy of it apart, when it is durable; the plan has snapshots, and this is
                a step with a commit.
            stop_after, stopping: as in `execute`.

        Raises:
            RunFailed: the loss is not finite.
            DiskError: there is no room for a snapshot; what was to be in it is durable.
            Stopped: as in `execute`. Unless the engine is `clean` then, it takes no more steps:
                open another one from the last commit.
        """
        late, on_fetch = self.model.plan.commits_late, self.model.plan.update == "on-fetch"
        pending = self._pending
        if snapshot and not commit:
            raise ValueError("a snapshot is of a commit")
        state = self._state(batches, self.model.plan.numerics.micro_tokens[: len(batches)])
        state.scale = 1.0 / max(1, targets)
        state.number, state.update, state.progress, state.stores = update.step, update, progress, commit
        name = _named("step, commit" if commit else "step", snapshot)
        if late:
            name = "first" if on_fetch else "step"
            if pending is not None:
                state.update, state.progress = pending.update or update, pending.progress
                state.stores = pending.commit if on_fetch else commit
                name = pending.name
        if self._speculates(commit, snapshot):
            state.ahead = Ahead(update, progress)
            name += SPECULATING
        if name.endswith(SNAPSHOT):
            self._begin_snapshot(state.progress)
        name = grouped(name, update.group)
        if len(batches) < len(self.model.plan.numerics.micro_rows):
            name = fewer(name, len(batches))
        if update.group is not None:
            self._turn_to(name)
        program = self.programs[name]
        with self._changing():
            timeline = self._run(name, stop_after=stop_after, stopping=stopping)
            check_finite(state.losses, state.square)
        self._pending = None
        if (on_fetch or (late and commit)) and not state.validated:
            self._pending = _Pending(update if on_fetch else None, progress, commit, snapshot)
        self._committed = state.validated or (commit and not late)
        self._last = progress
        outcome = state.outcome()
        limit = self.model.plan.numerics.clip
        self.expects_clip = limit is not None and outcome.grad_norm > limit
        return StepResult(outcome, timeline, program.graph)

    def _speculates(self, commit: bool, snapshot: bool) -> bool:
        """Whether a step is updated before its clip factor is known: the last one's was one, and what
        would have to be taken back is all that HEAD does not name."""
        pending = self._pending
        alone = self._committed if pending is None else pending.commit and not pending.snapshot
        return self.model.plan.speculate and not self.expects_clip and commit and alone and not snapshot

    @property
    def clean(self) -> bool:
        """Whether the execution under way, or the last one, has left every plane as it was: no
        update has begun since. Always False where an update of the step before is pending."""
        return not self.update_pending and not (self._running is not None and self._running.touched)

    def settle(self, progress: Progress, stopping: Stopping | None = None) -> None:
        """Apply what is pending and make the state durable, if it is not yet.

        Args:
            progress: of the last step; recorded by the commit.
        """
        self._check_usable()
        if self._pending is not None and self._is_made(self._pending):
            self._pending, self._committed = None, True
        pending = self._pending
        if self._committed and pending is None:
            return
        state = self._state((), ())
        state.progress = progress if pending is None else pending.progress
        kept = pending is not None and pending.snapshot
        if kept:
            self._begin_snapshot(state.progress)
        with self._changing():
            if pending is not None and pending.update is not None:
                state.update, state.stores = pending.update, True
                self._run(_named("drain", kept), stopping=stopping)
            else:
                self._run(_named("commit", kept), stopping=stopping)
            self._pending = None
        self._committed = True

    def _is_made(self, pending: _Pending) -> bool:
        """Whether a graph that was cut off later has done all that was left of a step."""
        head = self.runtime.writable.head
        stored = pending.update is None and head is not None and head.step == pending.progress.step
        return stored and not self.runtime.copying

    def _begin_snapshot(self, progress: Progress) -> None:
        """Make room for the snapshot of a step before a graph fills it; where there is none, no step so
        far is lost."""
        try:
            self.runtime.begin_snapshot(progress.step)
        except DiskError:
            if self._pending is not None:
                self._pending = replace(self._pending, snapshot=False)
            if self._last is not None:
                self.settle(self._last)
            raise

    def snapshots_made(self) -> list[tuple[int, Path]]:
        """(step, folder) of every snapshot that has become whole since this was asked last."""
        found, self.runtime.snapshots = self.runtime.snapshots, []
        return found

    def evaluate(
        self,
        batches: Iterator[list[Batch]],
        stopping: Stopping | None = None,
        token_bytes: Tensor | None = None,
    ) -> Tally:
        """The sums over groups of micro-batches as `evaluation_groups` cuts them.

        No update may be pending: `settle` first.

        Args:
            token_bytes: int32 [V], bytes of text that tokens stand for, where known.
        """
        self._check_settled()
        total = Tally()
        tokens = max(self.model.plan.numerics.micro_tokens)
        for group in batches:
            state = self._state(group, (tokens,) * len(group))
            state.token_bytes = None if token_bytes is None else token_bytes.to(self.runtime.place)
            self._run(f"evaluate {len(group)}", stopping=stopping)
            for micro in sorted(state.tallies):  # micro-batches in order, however grouped
                total += state.tallies[micro]
        return total

    def evaluation_groups(self, rows: int) -> list[tuple[int, ...]]:
        """Rows of each micro-batch of each group of one evaluation.

        Args:
            rows: one of `needs.evaluation_rows`.
        """
        return evaluation_batches(self.model.plan, rows)

    def generate(
        self,
        prompt: Sequence[int],
        stop: frozenset[int],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stopping: Stopping | None = None,
    ) -> Iterator[int]:
        """Continue a prompt until a stop token or the end of the cache. `settle` first, and let
        nothing else run until the last token: the cache lies where steps have other buffers.

        Args:
            prompt: token ids; only the newest are kept if there are more than the cache has positions.
            stop: ids after which nothing is generated; they are yielded too.
            temperature, top_p, seed: as in models.decode.sample.
        """
        import torch

        self._check_settled()
        positions = self.needs.sample_tokens
        ids = np.array(prompt[-positions:], np.int64)
        generator = torch.Generator().manual_seed(seed)
        position, name, capacity = 0, "prompt", positions
        while True:
            empty = np.full(len(ids), -1, np.int64)
            places = np.arange(position, position + len(ids), dtype=np.int32)
            state = self._state([Batch(ids, empty, places, (len(ids),))], (capacity,))
            state.position, state.positions = position, positions
            self._run(name, stopping=stopping)
            token = sample(self._logits(self.programs[name].graph), temperature, top_p, generator)
            yield token
            position += len(ids)
            if token in stop or position >= positions:
                return
            ids, name, capacity = np.array([token], np.int64), "token", 1

    def _logits(self, graph: StepGraph) -> Tensor:
        import torch

        buffer = int(np.flatnonzero(graph.buffer_kind == BufferKind.LOGITS)[0])
        memory = self.runtime.memory[Tier(int(graph.buffer_tier[buffer]))]
        low = int(graph.buffer_offset[buffer])
        return memory[low : low + int(graph.buffer_bytes[buffer])].view(torch.float32).cpu()

    def predicted(self, name: str) -> Timeline:
        """The simulated timeline of one of the run's graphs."""
        return simulate(self.programs[name].graph)

    def close(self) -> None:
        """Let go of files."""
        self.runtime.close()

    def _turn_to(self, name: str) -> None:
        """Graphs of groups are many: only the newest is kept."""
        if self._group not in ("", name):
            self.programs[self._group].forget()
            self.runtime.forget_views()
        self._group = name

    def _run(self, name: str, **arguments: Any) -> Timeline:
        self._running = self.programs[name]
        timeline = self._running.run(**arguments)
        if self.runtime.state.unverified:
            raise RuntimeError(f"{name}: what was read has not been verified")
        return timeline

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What may leave the planes half updated when it fails."""
        self._check_usable()
        try:
            yield
        except BaseException:
            self._failed = not self.clean
            self.runtime.writable.cancel()  # stores that were cut off
            raise

    def _check_usable(self) -> None:
        if self._failed:
            raise RuntimeError("an update was cut short: open another engine from the last commit")

    @property
    def update_pending(self) -> bool:
        """on-fetch: whether an update of the step before waits."""
        return self._pending is not None and self._pending.update is not None

    def _check_settled(self) -> None:
        self._check_usable()
        if self.update_pending:
            raise RuntimeError("an update is pending: settle first")

    def _state(self, batches: Sequence[Batch], capacities: tuple[int, ...]) -> StepState:
        state = StepState(batches=[self.runtime.prepare(batch) for batch in batches], capacities=capacities)
        self.runtime.state = state
        return state
