"""build_step: the graph of one optimizer step under a plan."""

from __future__ import annotations

from functools import partial

from packmule.graph.costs import Costs
from packmule.graph.emit import Emitter, Op, Piece, Stream
from packmule.graph.experts import ExpertTasks
from packmule.graph.gradients import Gradient, Gradients
from packmule.graph.kinds import BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.spills import Spills
from packmule.graph.step import StepGraph
from packmule.graph.updates import Targets, Updates
from packmule.graph.visits import Visit, ahead, arrange, emit
from packmule.graph.vocabulary import VocabularyTasks
from packmule.shapes.layout import PAGE


class _Step:
    """Builds the visits of one step; keeps the activations' and gradients' buffers."""

    def __init__(
        self,
        model: PlannedModel,
        costs: Costs,
        mean_length: float,
        pending: bool,
        commit: bool,
        snapshot: bool = False,
        group: int | None = None,
        speculate: bool = False,
    ) -> None:
        self.emitter = Emitter(model, costs, mean_length, snapshot)
        self.gradients = Gradients(self.emitter)
        self.updates = Updates(self.emitter, commit)
        self.experts = ExpertTasks(self.emitter)
        self.vocabulary = VocabularyTasks(self.emitter)
        self.model = model
        self.plan = model.plan
        self.pending = pending
        self.commit = commit
        self.speculate = speculate
        self.tokens = model.plan.numerics.micro_tokens
        self.head = len(model.blocks) - 1
        every = tuple(block.index for block in model.blocks)
        self.active = every if group is None else model.groups[group]
        self.lowest = self.active[0]
        self.inputs: dict[tuple[int, int], int] = {}
        self.saved: dict[tuple[int, int], list[int]] = {}
        self.dy: dict[int, int] = {}
        self.spills = Spills(self.emitter, self.experts, self.inputs, self.lowest)
        self.clip_scale = -1
        self.last_part: list[int] = []
        self.head_norm: list[int] = []
        self.balanced = False
        self.norms: list[int] = []

    # Buffers that visits share

    def input(self, block: int, micro: int) -> int:
        key = (block, micro)
        if key not in self.inputs:
            size = self.model.input_bytes(self.tokens[micro])
            self.inputs[key] = self.emitter.work(BufferKind.INPUT, size, block, micro)
        return self.inputs[key]

    def output_gradient(self, micro: int) -> int:
        """The gradient of a block's output; each block's backward overwrites it by its input's."""
        if micro not in self.dy:
            size = self.model.input_bytes(self.tokens[micro])
            self.dy[micro] = self.emitter.work(BufferKind.DY, size, micro=micro)
        return self.dy[micro]

    def trained(self, block: int, again: bool) -> list[int]:
        """The buffer of a block's gradient; none where the step does not train it."""
        return [self.gradients.near(block, again)] if block in self.active else []

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
            visit.after += self.spills.away(block, micro)
        return visit

    def _forward_weights(self, block: int, update: bool) -> tuple[Stream, list[int]]:
        emitter, model, place = self.emitter, self.model, self.model.place(block)
        if not update:
            return emitter.weights(block)
        gradient = self.gradients.held(block)
        splits, kept = self.updates.splits(block), place.weights != "state"
        near = emitter.near_weights(block) if splits else None
        target = None
        if place.weights == "ram":
            target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, block)
        elif not model.master_is_weights(block) and (kept or self.updates.here(block)):
            target = emitter.ram(BufferKind.WEIGHTS, model.weight_bytes[block], block)
        stream = self.updates.apply(block, gradient, self.scale, Targets(target, near, kept))
        if place.weights == "disk" and target is not None:
            stream.append(Piece(None, emitter.store_weights(block, target)))
        if near is not None:
            return stream, [near]
        if target is None:
            target = emitter.resident(BufferKind.STATE, Tier.RAM, block)
        return emitter.sent(block, stream, [target])

    def _forward(self, block: int, micro: int, weights: list[int]) -> None:
        emitter, model, tokens = self.emitter, self.model, self.tokens[micro]
        if model.blocks[block].kind == "embed":
            out = self.input(model.following(block), micro)
            # Each further part fills in tokens of its own.
            reads = weights if block == 0 else [*weights, out]
            emitter.compute(TaskKind.EMBED_FORWARD, tokens, reads, [out], block, micro)
            return
        keep = not model.recomputes(block) and block >= self.lowest
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

    def loss(self, micros: list[int]) -> list[Visit]:
        """What comes before the head's backward: every token's log-sum-exp, where the head's matrix is
        in parts. A whole head runs forward and backward at once."""
        if not self.model.cut:
            return []
        update, tied = self.pending and 0 in micros, self.model.shape.tied
        fetch, self.head_norm = self._forward_weights(self.head, update)
        visits: list[Visit] = []
        for part in self.model.head_parts:
            stream, own = self._forward_weights(part, update and not tied)
            visit, self.last_part = Visit([*fetch, *stream]), [*own, *self.head_norm]
            for micro in micros:
                visit.compute.append(partial(self._score, part, micro, self.last_part))
            visits.append(visit)
            fetch = []
        return visits

    def _score(self, part: int, micro: int, weights: list[int]) -> None:
        reads = [*weights, self.input(self.head, micro)]
        self.vocabulary.score(part, micro, self.tokens[micro], reads)

    def head_backward(self, micros: list[int], again: bool) -> list[tuple[Visit, int]]:
        """The head's visits, each with the block whose gradient is complete with it, or -1. Its parts come
        in reverse order: the weights of the last one are still there."""
        if not self.model.cut:
            return [(self._whole_head(micros, again), self.head)]
        visits: list[tuple[Visit, int]] = []
        for part in reversed(self.model.head_parts):
            visit, weights = Visit(), self.last_part
            if visits or again:
                visit.fetch, own = self.emitter.weights(part)
                weights = [*own, *self.head_norm]
            for micro in micros:
                visit.compute.append(partial(self._part_gradient, part, micro, weights, again))
            if self.model.halved(part):
                half = self.gradients.at_head(part, again)
                if self.emitter.near == Tier.DEVICE:
                    size = self.model.plane_bytes[part]
                    received = self.emitter.ram(BufferKind.GRADIENT, size, part)
                    visit.after = [self.gradients.receive(part, half, received)]
                    half = received
                visit.after = [*visit.after, *self.gradients.store(part, half)]
            visits.append((visit, -1 if self.model.shape.tied else part))
        close = Visit(compute=[partial(self._close, micro, self.head_norm, again) for micro in micros])
        return [*visits, (close, self.head)]

    def _part_gradient(self, part: int, micro: int, weights: list[int], again: bool) -> None:
        reads = [*weights, self.input(self.head, micro)]
        gradient = self.gradients.at_head(part, again)
        self.vocabulary.gradient(part, micro, self.tokens[micro], reads, gradient, again)

    def _close(self, micro: int, weights: list[int], again: bool) -> None:
        reads = [*weights, self.input(self.head, micro)]
        dy, gradient = self.output_gradient(micro), self.gradients.near(self.head, again)
        self.vocabulary.close(micro, self.tokens[micro], reads, dy, gradient, again)

    def _whole_head(self, micros: list[int], again: bool) -> Visit:
        """Forward and backward at once, in chunks of tokens."""
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
        gradients = [buffer for owner in owners for buffer in self.trained(owner, again)]
        writes = [self.output_gradient(micro), *gradients]
        reads = [*weights, self.input(block, micro)]
        tokens = self.tokens[micro]
        self.emitter.compute(
            TaskKind.HEAD_LOSS, tokens, reads, writes, block, micro, again=again, frozen=not gradients
        )

    def backward(self, block: int, micros: list[int], again: bool) -> Visit:
        """Fetch weights and spilled inputs, run; the aftermath is `complete`'s."""
        visit = Visit()
        if self.model.blocks[block].kind == "embed":
            embedding: list[int] = []
            if self.model.works.embed_backward_reads_weights:
                visit.fetch, embedding = self.emitter.weights(block)
            if self.model.halved(block):
                visit.fetch = [*visit.fetch, *self.gradients.read(block, again)]
            visit.compute = [
                partial(self._embed_backward, block, micro, embedding, again) for micro in micros
            ]
            return visit
        visit.fetch, weights = self.emitter.weights(block)
        visit.fetch = list(visit.fetch)
        for micro in micros:
            visit.fetch += self.spills.back(block, micro)
            visit.compute.append(partial(self._backward, block, micro, weights, again))
        return visit

    def _backward(self, block: int, micro: int, weights: list[int], again: bool) -> None:
        emitter, model, tokens = self.emitter, self.model, self.tokens[micro]
        # The first backward overwrites what was saved.
        recompute, dy = model.recomputes(block) or again, self.output_gradient(micro)
        gradients = self.trained(block, again)
        if model.blocks[block].kind == "experts":
            self.experts.backward(block, micro, tokens, weights, dy, gradients, recompute)
            return
        saved = emitter.saved(block, tokens, micro) if recompute else self.saved.pop((block, micro))
        kind, reads = TaskKind.LAYER_BACKWARD, [*weights, self.input(block, micro), dy]
        if model.works.experts(block) is not None:
            kind, balance = TaskKind.ROUTE_BACKWARD, self.experts.balance(block)
            reads += [*self.experts.closed(block, micro), *([balance] if balance >= 0 else [])]
        reads += [] if recompute else saved
        writes = [dy, *gradients, *saved]
        emitter.compute(kind, tokens, reads, writes, block, micro, recompute, again, not gradients)

    def _embed_backward(self, block: int, micro: int, weights: list[int], again: bool) -> None:
        reads, writes = [*weights, self.output_gradient(micro)], [self.gradients.near(block, again)]
        self.emitter.compute(TaskKind.EMBED_BACKWARD, self.tokens[micro], reads, writes, block, micro)

    def norm(self, block: int) -> Op:
        """The sums of squares of a block's gradient."""
        emitter, size = self.emitter, self.model.plane_bytes[block]
        if emitter.has_resident(BufferKind.NORMS, Tier.RAM, block):
            norms = emitter.resident(BufferKind.NORMS, Tier.RAM, block)
        else:
            norms = emitter.ram(BufferKind.NORMS, self.model.norm_bytes(block), block)
        self.norms.append(norms)
        gradient, seconds = self.gradients.near(block), emitter.computing.compute(moved=size)
        return lambda: emitter.task(TaskKind.NORM, seconds, [gradient], [norms], block, near=True)

    def complete(self, visit: Visit, block: int) -> None:
        """A block's gradient has its last contribution in a visit: its norm, then update or storage."""
        if block not in self.active:
            return
        plan = self.plan
        if self.emitter.near == Tier.DEVICE:
            visit.compute.append(self.norm(block))
            stream: Stream = []
        else:
            stream = [Piece(None, self.norm(block))]
        if plan.update == "on-backward":
            stream = [*stream, *self.update_now(block)]
        else:
            arrived, gradient = self.gradients.arrive(block)
            stream = [*stream, *arrived]
            if self.speculate:
                stream = [*stream, *self.update(block, gradient, ahead=True)]
            if plan.placement.gradients == "disk" and gradient.ram is not None:
                stream = [*stream, *self.gradients.store(block, gradient.ram)]
        visit.after = [*visit.after, *stream]

    def update_now(self, block: int, again: bool = False) -> Stream:
        """on-backward: the update of a block whose gradient is complete. Where cores and device share it, the
        cores get the gradient of their chunks alone."""
        if self.updates.splits(block):
            return self.update(block, Gradient(near=self.gradients.near(block, again)))
        stream, gradient = self.gradients.arrive(block, again)
        return [*stream, *self.update(block, gradient)]

    def update(self, block: int, gradient: Gradient, ahead: bool = False) -> Stream:
        """The rule outside a forward fetch; compute weights that are kept are renewed too.

        Args:
            ahead: before the clip factor is known, as if it were one.
        """
        emitter, model, place = self.emitter, self.model, self.model.place(block)
        splits, stays = self.updates.splits(block), model.on_device(block)
        near = emitter.near_weights(block) if splits and stays else None
        target = None
        if place.weights == "ram":
            target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, block)
        elif place.weights == "disk" or (
            stays and not model.master_is_weights(block) and self.updates.here(block)
        ):
            target = emitter.ram(BufferKind.WEIGHTS, self.model.weight_bytes[block], block)
        targets = Targets(target, near, place.weights != "state")
        if ahead:
            stream = self.updates.apply(block, gradient, None, targets, TaskKind.UPDATE_AHEAD)
        else:
            stream = self.updates.apply(block, gradient, self.scale, targets)
        if place.weights == "disk" and target is not None:
            stream.append(Piece(None, emitter.store_weights(block, target)))
        if stays and near is None:
            source = emitter.resident(BufferKind.STATE, Tier.RAM, block) if target is None else target
            stream.append(emitter.renew(block, source))
        return stream

    def clip(self) -> None:
        """The clip factor from all norms."""
        if self.scale is not None:
            self.emitter.task(TaskKind.CLIP, self.emitter.costs.task_seconds, self.norms, [self.scale], -1)

    # The step

    def visits(self) -> list[Visit]:
        """All visits in order, with the aftermath of the last contribution to each gradient."""
        blocks, every = self.model.blocks, list(range(len(self.tokens)))
        passed = [block.index for block in blocks if block.kind in ("embed", "layer", "experts")]
        resident = self.plan.placement.state == "ram"
        if self.plan.numerics.clip is not None and self.plan.update != "on-fetch":
            self.clip_scale = self.emitter.ram(BufferKind.SCALE, PAGE)
        groups = [every] if self.plan.order == "breadth" else [[micro] for micro in every]
        visits: list[Visit] = []
        for number, micros in enumerate(groups):
            last = number == len(groups) - 1
            visits += [self.forward(block, micros) for block in passed]
            visits += self.loss(micros)
            if self.model.two_passes:
                continue
            backward = self.head_backward(micros, False)
            if self.pending and self.commit and not resident and number == 0:
                # With the last pending update.
                update = visits[-1] if self.model.cut else backward[0][0]
                update.fetch = [*update.fetch, *self.emitter.commit()]
            backward += self.layers_backward(micros, False)
            for visit, block in backward:
                if last and block >= 0:
                    self.complete(visit, block)
                visits.append(visit)
        if self.model.two_passes:
            visits += self.two_passes(every)
        else:
            for visit, block in self.embedding_backward(every, False):
                self.complete(visit, block)
                visits.append(visit)
        if self.commit and resident:
            self.spread(visits)
        elif self.commit:
            self.copy_others(visits)
        return visits

    def layers_backward(self, micros: list[int], again: bool) -> list[tuple[Visit, int]]:
        """From the last layer to the first that has to be passed, each with its block."""
        layers = [b.index for b in self.model.blocks if b.layer >= 0 and b.index >= self.lowest]
        return [(self.backward(block, micros, again), block) for block in reversed(layers)]

    def embedding_backward(self, micros: list[int], again: bool) -> list[tuple[Visit, int]]:
        """The embedding's contributions, which come last, so that a tied gradient adds up in one order."""
        blocks = [block for block in reversed(self.model.embedding) if block in self.active]
        return [(self.backward(block, micros, again), block) for block in blocks]

    def two_passes(self, micros: list[int]) -> list[Visit]:
        """Backward for the norm alone, the clip factor, and backward again with updates (LOMO: Lv et
        al. 2023, arXiv:2306.09782, section 3.3): no two blocks' gradients are there at once."""
        visits: list[Visit] = []
        for again in (False, True):
            backward = self.head_backward(micros, again)
            backward += self.layers_backward(micros, again)
            backward += self.embedding_backward(micros, again)
            for visit, block in backward:
                visits.append(visit)
                if block not in self.active:
                    continue
                if again:
                    visit.after = [*visit.after, *self.update_now(block, again)]
                else:
                    # Not in the aftermath, which would come after the clip factor.
                    visit.compute.append(self.norm(block))
            if not again:
                visits[-1].compute.append(self.clip)
        return visits

    def spread(self, visits: list[Visit]) -> None:
        """Commit the step before: its state, which is resident, is stored evenly over this one's visits,
        in the order in which blocks are updated. A block's update waits for its own store only."""
        on_fetch = self.plan.update == "on-fetch"
        blocks = [block.index for block in self.model.blocks]
        if self.plan.update == "on-backward":
            updated = self._completed()
            blocks = [*updated, *(block for block in blocks if block not in updated)]
        waiting = [
            (self._visit_of_update(block, len(visits)), piece)
            for block in blocks
            for piece in self.emitter.stores(block)
        ]
        total, done = len(waiting), 0
        for number, visit in enumerate(visits):
            until, stores = total * (number + 1) // len(visits), []
            while done < total:
                when, piece = waiting[done]
                early = on_fetch and when > number  # its update is what is to be stored
                last = not on_fetch and when <= number  # its next update follows
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
        if self.plan.update == "after-backward":
            return visits
        completed = self._completed()
        if block not in completed:
            return visits
        # Some visits pass blocks that are not trained; the last ones are the embedding's.
        passed = [b for b in self._order() if b >= self.lowest or b in self.active]
        return visits - len(passed) + passed.index(block)

    def _completed(self) -> list[int]:
        """The blocks that are trained in the order in which their gradients are complete."""
        return [block for block in self._order() if block in self.active]

    def copy_others(self, visits: list[Visit]) -> None:
        """A snapshot has the state of blocks too that this step does not store: it is copied from their
        slots, evenly over the visits."""
        others = [block.index for block in self.model.blocks if block.index not in self.active]
        copies = [piece for block in others for piece in self.emitter.copies(block)]
        done = 0
        for number, visit in enumerate(visits, start=1):
            until = len(copies) * number // len(visits)
            visit.after = [*visit.after, *copies[done:until]]
            done = until

    def _order(self) -> list[int]:
        """All blocks as their last visits come, but for the head's norm, which comes after its parts."""
        blocks = [block.index for block in self.model.blocks]
        parts = [block.index for block in self.model.blocks if block.kind == "logits"]
        return [*reversed(parts), self.head, *(b for b in reversed(blocks[:-1]) if b not in parts)]


def build_step(
    model: PlannedModel,
    costs: Costs,
    mean_length: float,
    *,
    pending: bool = False,
    commit: bool = False,
    snapshot: bool = False,
    group: int | None = None,
    speculate: bool = False,
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
        group: of `model.groups`, the one whose turn it is: only its blocks have gradients and updates,
            and backward stops at the lowest of them. None: all blocks.
        speculate: on-fetch only: update in backward as if nothing were clipped, and commit at the end if
            that was so (speculation and validation: Lian et al. 2025, arXiv:2509.21271). Gradients stay for
            the next step, where they have to be applied otherwise.
    """
    plan = model.plan
    if group is not None and plan.update == "on-fetch":
        raise ValueError("a step that trains a group does not wait for the next one to update it")
    step = _Step(model, costs, mean_length, pending, commit, snapshot, group, speculate)
    visits = step.visits()
    arrange(visits, plan.io, ahead(plan))
    if not model.two_passes:
        step.clip()
    if plan.update == "after-backward":
        for block in step.active:
            emit(step.update(block, step.gradients.held(block)), plan.io)
    if commit and not plan.commits_late:
        emit(step.emitter.commit(), plan.io)
    if speculate and step.scale is not None:
        step.emitter.validate(step.scale)
    return step.emitter.build()


def build_drain(model: PlannedModel, costs: Costs, snapshot: bool = False) -> StepGraph:
    """on-fetch: apply the pending updates without a forward, then commit."""
    step = _Step(model, costs, 1.0, pending=True, commit=True, snapshot=snapshot)
    for block in model.blocks:
        emit(step.update(block.index, step.gradients.held(block.index)), model.plan.io)
    emit(step.emitter.commit(), model.plan.io)
    return step.emitter.build()
