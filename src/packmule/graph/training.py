"""build_step: the graph of one optimizer step under a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from packmule.graph.costs import Costs
from packmule.graph.emit import Emitter, Op, Piece, Stream, in_order
from packmule.graph.experts import ExpertTasks
from packmule.graph.kinds import BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.step import StepGraph
from packmule.shapes.layout import ITEMSIZE, PAGE, round_up
from packmule.spec.plan import Io


@dataclass
class Visit:
    """Some micro-batches at one block in one direction.

    Attributes:
        fetch: brings what the computation needs; runs ahead.
        compute: the computation, one op per micro-batch.
        after: what follows from it (updates, stores); may lag behind.
    """

    fetch: Stream = field(default_factory=list)
    compute: list[Op] = field(default_factory=list)
    after: Stream = field(default_factory=list)


def arrange(visits: list[Visit], io: Io) -> None:
    """Emit visits in program order: fetches `io.prefetch` visits ahead, aftermath one visit late,
    both interleaved with the computation between them.

    While an operation of a visit computes, the disk can do no more than the reads that stand
    before it: `io.read_ahead` chunks of the stream. As many chunks' updates follow the operation
    without waiting."""
    prefetch = io.prefetch
    if prefetch == 0:
        for visit in visits:
            _emit(visit.fetch, io)
            for op in visit.compute:
                op()
            _emit(visit.after, io)
        return
    for visit in visits[:prefetch]:
        _emit(visit.fetch, io)
    late: Stream = []
    for index, visit in enumerate(visits):
        ahead = visits[index + prefetch].fetch if index + prefetch < len(visits) else []
        lead, units = in_order([*ahead, *late], io.read_ahead)
        for op in lead:
            op()
        done = 0
        for number, op in enumerate(visit.compute, start=1):
            op()
            until = len(units) * number // len(visit.compute)
            for unit in units[done:until]:
                unit()
            done = until
        late = visit.after
    _emit(late, io)


def _emit(stream: Stream, io: Io) -> None:
    lead, units = in_order(stream, io.read_ahead)
    for op in [*lead, *units]:
        op()


class _Step:
    """Builds the visits of one step; keeps the activations' and gradients' buffers."""

    def __init__(
        self, model: PlannedModel, costs: Costs, mean_length: float, pending: bool, snapshot: bool
    ) -> None:
        self.emitter = Emitter(model, costs, mean_length, snapshot)
        self.experts = ExpertTasks(self.emitter)
        self.model = model
        self.plan = model.plan
        self.pending = pending
        self.tokens = model.plan.numerics.micro_tokens
        self.head = len(model.blocks) - 1
        self.inputs: dict[tuple[int, int], int] = {}
        self.saved: dict[tuple[int, int], list[int]] = {}
        self.dy: dict[int, int] = {}
        self.spilled: dict[tuple[int, int, int], int] = {}
        self.clip_scale = -1
        self.balanced = False
        self.gradients: dict[tuple[int, bool], int] = {}
        self.norms: list[int] = []

    # Buffers that visits share

    def input(self, block: int, micro: int) -> int:
        key = (block, micro)
        if key not in self.inputs:
            size = self.model.input_bytes(self.tokens[micro])
            self.inputs[key] = self.emitter.ram(BufferKind.INPUT, size, block, micro)
        return self.inputs[key]

    def output_gradient(self, micro: int) -> int:
        """The gradient of a block's output; each block's backward overwrites it by its input's."""
        if micro not in self.dy:
            size = self.model.input_bytes(self.tokens[micro])
            self.dy[micro] = self.emitter.ram(BufferKind.DY, size, micro=micro)
        return self.dy[micro]

    def gradient(self, block: int, again: bool = False) -> int:
        """A block's gradient.

        Args:
            again: that of the second backward of a step that has two.
        """
        if (block, again) not in self.gradients:
            if self.emitter.has_resident(BufferKind.GRADIENT, Tier.RAM, block):
                buffer = self.emitter.resident(BufferKind.GRADIENT, Tier.RAM, block)
            else:
                buffer = self.emitter.ram(BufferKind.GRADIENT, self.model.plane_bytes[block], block)
            self.gradients[block, again] = buffer
        return self.gradients[block, again]

    @property
    def scale(self) -> int | None:
        if self.plan.numerics.clip is None:
            return None
        if self.plan.update == "on-fetch":
            return self.emitter.resident(BufferKind.SCALE, Tier.RAM, -1)
        return self.clip_scale

    # Visits

    def forward(self, block: int, micros: list[int]) -> Visit:
        """Fetch (with the pending update on the first visit), run, spill inputs."""
        visit = Visit()
        first = 0 in micros
        visit.fetch, weights = self._forward_weights(block, update=self.pending and first)
        for micro in micros:
            visit.compute.append(partial(self._forward, block, micro, weights))
            for kind in self.spills(block):
                visit.after.append(Piece(None, partial(self._spill, kind, block, micro)))
        return visit

    def spills(self, block: int) -> list[BufferKind]:
        """What goes to disk between the forward and the backward of a block: a layer's input; after
        its last group of experts, where its tokens went. What the last blocks need stays: their
        backward's fetch would come before the store, which lags a visit."""
        near = 2 * block > 2 * self.head - self.plan.io.prefetch - 2
        if self.plan.placement.inputs == "ram" or block == 0 or near:
            return []
        if self.model.blocks[block].kind == "layer":
            return [BufferKind.INPUT]
        return [BufferKind.ROUTED] if self.model.closes(block) else []

    def _spillable(self, kind: BufferKind, block: int) -> tuple[dict[tuple[int, int], int], int]:
        """The buffers of a kind, and the block whose number they bear."""
        if kind == BufferKind.INPUT:
            return self.inputs, block
        return self.experts.routed, self.model.opening(block)

    def _spill(self, kind: BufferKind, block: int, micro: int) -> None:
        emitter = self.emitter
        buffers, owner = self._spillable(kind, block)
        source = buffers.pop((owner, micro))
        size = self._spilled_bytes(kind, owner, micro)
        stored = emitter.builder.buffer(kind, Tier.DISK, size, block=owner, micro=micro)
        task = TaskKind.WRITE_INPUT if kind == BufferKind.INPUT else TaskKind.WRITE_ROUTED
        emitter.disk_task(task, size, [source], [stored], owner, micro)
        self.spilled[kind, owner, micro] = stored

    def _spilled_bytes(self, kind: BufferKind, owner: int, micro: int) -> int:
        tokens = self.tokens[micro]
        if kind == BufferKind.INPUT:
            return self.model.input_bytes(tokens)
        return self.experts.routed_bytes(owner, tokens)

    def _forward_weights(self, block: int, update: bool) -> tuple[Stream, list[int]]:
        emitter, model, place = self.emitter, self.model, self.plan.placement
        if not update:
            return emitter.weights(block)
        source = None if place.gradients == "disk" else self.gradient(block)
        if model.master_is_weights:
            return emitter.update(block, source, self.scale, None), [
                emitter.resident(BufferKind.STATE, Tier.RAM, block)
            ]
        if place.weights == "ram":
            target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, block)
        else:
            target = emitter.ram(BufferKind.WEIGHTS, model.weight_bytes[block], block)
        stream = emitter.update(block, source, self.scale, target)
        if place.weights == "disk":
            stream.append(Piece(None, emitter.store_weights(block, target)))
        return stream, [target]

    def _forward(self, block: int, micro: int, weights: list[int]) -> None:
        emitter, model, tokens = self.emitter, self.model, self.tokens[micro]
        if block == 0:
            out = self.input(model.following(block), micro)
            emitter.compute(TaskKind.EMBED_FORWARD, tokens, weights, [out], block, micro)
            return
        keep = not model.recomputes(block)
        if model.blocks[block].kind == "experts":
            out = self.input(model.following(block), micro) if model.closes(block) else -1
            self.experts.forward(block, micro, tokens, weights, out, keep)
            return
        kind, reads = TaskKind.LAYER_FORWARD, [*weights, self.input(block, micro)]
        if model.works.experts(block) is None:
            writes = [self.input(model.following(block), micro)]
        else:
            kind, writes = TaskKind.ROUTE_FORWARD, self.experts.opened(block, micro, tokens)
            balance = self.experts.balance(block)
            if balance >= 0:
                reads += [balance] if self.balanced else []
                writes.append(balance)
                self.balanced = True
        saved = emitter.saved(block, tokens, micro)
        if keep:
            self.saved[block, micro] = saved
        emitter.compute(kind, tokens, reads, [*writes, *saved], block, micro)

    def loss(self, micros: list[int], again: bool) -> Visit:
        """The head: forward and backward at once, in chunks of tokens."""
        visit = Visit()
        emitter, model, block = self.emitter, self.model, self.head
        update = self.pending and 0 in micros
        visit.fetch, weights = self._forward_weights(block, update)
        shared = model.blocks[block].shared
        if shared is not None:
            stream, more = emitter.weights(shared)
            visit.fetch = [*visit.fetch, *stream]
            weights = [*weights, *more]
        for micro in micros:
            visit.compute.append(partial(self._loss, micro, weights, shared, again))
        return visit

    def _loss(self, micro: int, weights: list[int], shared: int | None, again: bool) -> None:
        block = self.head
        owners = [block] if shared is None else [block, shared]
        writes = [self.output_gradient(micro), *(self.gradient(owner, again) for owner in owners)]
        reads = [*weights, self.input(block, micro)]
        tokens = self.tokens[micro]
        self.emitter.compute(TaskKind.HEAD_LOSS, tokens, reads, writes, block, micro, again=again)

    def backward(self, block: int, micros: list[int], again: bool) -> Visit:
        """Fetch weights and spilled inputs, run; the aftermath is `complete`'s."""
        visit = Visit()
        if block == 0:
            embedding: list[int] = []
            if self.model.works.embed_backward_reads_weights:
                visit.fetch, embedding = self.emitter.weights(block)
            visit.compute = [partial(self._embed_backward, micro, embedding, again) for micro in micros]
            return visit
        visit.fetch, weights = self.emitter.weights(block)
        visit.fetch = list(visit.fetch)
        for micro in micros:
            for kind in self.spills(block):
                visit.fetch.append(Piece(partial(self._unspill, kind, block, micro), None))
            visit.compute.append(partial(self._backward, block, micro, weights, again))
        return visit

    def _unspill(self, kind: BufferKind, block: int, micro: int) -> None:
        buffers, owner = self._spillable(kind, block)
        size = self._spilled_bytes(kind, owner, micro)
        target = buffers[owner, micro] = self.emitter.ram(kind, size, owner, micro)
        task = TaskKind.READ_INPUT if kind == BufferKind.INPUT else TaskKind.READ_ROUTED
        self.emitter.disk_task(task, size, [self.spilled[kind, owner, micro]], [target], owner, micro)

    def _backward(self, block: int, micro: int, weights: list[int], again: bool) -> None:
        emitter, model, tokens = self.emitter, self.model, self.tokens[micro]
        # The first backward overwrites what was saved.
        recompute, dy = model.recomputes(block) or again, self.output_gradient(micro)
        gradient = self.gradient(block, again)
        if model.blocks[block].kind == "experts":
            self.experts.backward(block, micro, tokens, weights, dy, gradient, recompute)
            return
        saved = emitter.saved(block, tokens, micro) if recompute else self.saved.pop((block, micro))
        kind, reads = TaskKind.LAYER_BACKWARD, [*weights, self.input(block, micro), dy]
        if model.works.experts(block) is not None:
            kind, balance = TaskKind.ROUTE_BACKWARD, self.experts.balance(block)
            reads += [*self.experts.closed(block, micro), *([balance] if balance >= 0 else [])]
        reads += [] if recompute else saved
        writes = [dy, gradient, *saved]
        emitter.compute(kind, tokens, reads, writes, block, micro, recompute, again)

    def _embed_backward(self, micro: int, weights: list[int], again: bool) -> None:
        reads, writes = [*weights, self.output_gradient(micro)], [self.gradient(0, again)]
        self.emitter.compute(TaskKind.EMBED_BACKWARD, self.tokens[micro], reads, writes, 0, micro)

    def norm(self, block: int) -> Op:
        """The sums of squares of a block's gradient."""
        emitter, size = self.emitter, self.model.plane_bytes[block]
        count = len(self.model.blocks[block].parameters)
        norms = emitter.ram(BufferKind.NORMS, round_up(count * ITEMSIZE["float64"], PAGE), block)
        self.norms.append(norms)
        gradient, seconds = self.gradient(block), emitter.costs.compute(moved=size)
        return lambda: emitter.core_task(TaskKind.NORM, seconds, [gradient], [norms], block)

    def complete(self, block: int) -> Stream:
        """A block's gradient has its last contribution: its norm, then update or storage."""
        emitter, plan = self.emitter, self.plan
        gradient, stream = self.gradient(block), [Piece(None, self.norm(block))]
        if plan.update == "on-backward":
            return [*stream, *self.update(block, gradient)]
        if plan.placement.gradients == "disk":
            for part, (_, length) in enumerate(self.model.chunks(block)):
                stored = emitter.resident(BufferKind.GRADIENT_CHUNK, Tier.DISK, block, part)
                stream.append(Piece(None, self._store_gradient(length, gradient, stored, block, part)))
        return stream

    def _store_gradient(self, size: int, source: int, stored: int, block: int, part: int) -> Op:
        return lambda: self.emitter.disk_task(
            TaskKind.WRITE_GRADIENT, size, [source], [stored], block, part=part
        )

    def update(self, block: int, gradient: int | None) -> Stream:
        """The rule outside a forward fetch; compute weights that are kept are renewed too."""
        emitter, place = self.emitter, self.plan.placement
        target = None
        if place.weights == "ram":
            target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, block)
        elif place.weights == "disk":
            target = emitter.ram(BufferKind.WEIGHTS, self.model.weight_bytes[block], block)
        stream = emitter.update(block, gradient, self.scale, target)
        if place.weights == "disk" and target is not None:
            stream.append(Piece(None, emitter.store_weights(block, target)))
        return stream

    def clip(self) -> None:
        """The clip factor from all norms."""
        if self.scale is not None:
            self.emitter.core_task(
                TaskKind.CLIP, self.emitter.costs.task_seconds, self.norms, [self.scale], -1
            )

    # The step

    def visits(self, commit: bool) -> list[Visit]:
        """All visits in order, with the aftermath of the last contribution to each gradient."""
        count, layers = len(self.tokens), range(1, self.head)
        every = list(range(count))
        resident = self.plan.placement.state == "ram"
        if self.plan.numerics.clip is not None and self.plan.update != "on-fetch":
            self.clip_scale = self.emitter.ram(BufferKind.SCALE, PAGE)
        groups = [every] if self.plan.order == "breadth" else [[micro] for micro in every]
        visits: list[Visit] = []
        for number, micros in enumerate(groups):
            last = number == len(groups) - 1
            visits += [self.forward(block, micros) for block in range(self.head)]
            if self.model.two_passes:
                continue
            head = self.loss(micros, False)
            if self.pending and commit and not resident and number == 0:
                head.fetch = [*head.fetch, *self.emitter.commit()]
            if last:
                head.after += self.complete(self.head)
            visits.append(head)
            for block in reversed(layers):
                visit = self.backward(block, micros, False)
                if last:
                    visit.after += self.complete(block)
                visits.append(visit)
        if self.model.two_passes:
            visits += self.two_passes(every)
        else:
            # The embedding's contributions come last, so that a tied gradient adds up in one order.
            embed = self.backward(0, every, False)
            embed.after += self.complete(0)
            visits.append(embed)
        if commit and resident:
            self.spread(visits)
        return visits

    def two_passes(self, micros: list[int]) -> list[Visit]:
        """Backward for the norm alone, the clip factor, and backward again with updates (LOMO: Lv et
        al. 2023, arXiv:2306.09782, section 3.3): no two blocks' gradients are there at once."""
        visits: list[Visit] = []
        for again in (False, True):
            for block in reversed(range(len(self.model.blocks))):
                visit = self.backward(block, micros, again) if block < self.head else self.loss(micros, again)
                if again:
                    visit.after += self.update(block, self.gradient(block, again))
                else:
                    # Not in the aftermath, which would come after the clip factor.
                    visit.compute.append(self.norm(block))
                visits.append(visit)
            if not again:
                visits[-1].compute.append(self.clip)
        return visits

    def spread(self, visits: list[Visit]) -> None:
        """Commit the step before: its state, which is resident, is stored evenly over this one's visits,
        in the order in which blocks are updated. A block's update waits for its own store only."""
        on_fetch = self.plan.update == "on-fetch"
        blocks = [block.index for block in self.model.blocks]
        if self.plan.update == "on-backward":
            blocks.reverse()
        waiting = [
            (self._visit_of_update(block, len(visits)), piece)
            for block in blocks
            for piece in self.emitter.stores(block)
        ]
        total, done = len(waiting), 0
        for number, visit in enumerate(visits):
            until, stores = total * (number + 1) // len(visits), []
            while done < total:
                updated, piece = waiting[done]
                early = on_fetch and updated > number  # its update is what is to be stored
                last = not on_fetch and updated <= number  # its next update follows
                if early or (done >= until and not last):
                    break
                stores.append(piece)
                done += 1
            if number == len(visits) - 1:
                stores.append(Piece(None, self.emitter.seal))
            visit.after = [*stores, *visit.after]

    def _visit_of_update(self, block: int, visits: int) -> int:
        """The visit with a block's update; `visits`: it comes after them all."""
        if self.plan.update == "on-fetch":
            return block
        return visits - 1 - block if self.plan.update == "on-backward" else visits


def build_step(
    model: PlannedModel,
    costs: Costs,
    mean_length: float,
    *,
    pending: bool = False,
    commit: bool = False,
    snapshot: bool = False,
) -> StepGraph:
    """The graph of one optimizer step.

    Args:
        model: shapes and plan.
        costs: rates for the predicted seconds.
        mean_length: tokens per document, weighted by tokens; for attention's FLOPs.
        pending: on-fetch only: gradients of the step before wait to be applied.
        commit: make the state durable when its last update is done (the step before's, where
            `Plan.commits_late`).
        snapshot: write the state that is committed to a snapshot, too.
    """
    step = _Step(model, costs, mean_length, pending, snapshot)
    plan = model.plan
    visits = step.visits(commit)
    arrange(visits, plan.io)
    if not model.two_passes:
        step.clip()
    if plan.update == "after-backward":
        for block in model.blocks:
            disk = plan.placement.gradients == "disk"
            _emit(step.update(block.index, None if disk else step.gradient(block.index)), plan.io)
    if commit and not plan.commits_late:
        _emit(step.emitter.commit(), plan.io)
    return step.emitter.build()


def build_drain(model: PlannedModel, costs: Costs, snapshot: bool = False) -> StepGraph:
    """on-fetch: apply the pending updates without a forward, then commit."""
    step = _Step(model, costs, 1.0, pending=True, snapshot=snapshot)
    disk = model.plan.placement.gradients == "disk"
    for block in model.blocks:
        _emit(step.update(block.index, None if disk else step.gradient(block.index)), model.plan.io)
    _emit(step.emitter.commit(), model.plan.io)
    return step.emitter.build()
