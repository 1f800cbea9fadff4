"""Graphs of the other phases of a run: loading, committing, evaluating, generating."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from packmule.graph.costs import Costs
from packmule.graph.emit import Emitter, Piece
from packmule.graph.experts import ExpertTasks
from packmule.graph.kinds import BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.step import StepGraph
from packmule.graph.visits import Visit, ahead, arrange
from packmule.graph.vocabulary import VocabularyTasks
from packmule.shapes import bodies
from packmule.shapes.layout import ITEMSIZE, PAGE, round_up
from packmule.spec.plan import Io


def build_load(model: PlannedModel, costs: Costs) -> StepGraph:
    """Read and verify every slot; fill what the plan keeps in RAM or in work.bin."""
    emitter = Emitter(model, costs, 1.0)
    visits = [_loaded(emitter, block.index) for block in model.blocks]
    arrange(visits, Io(prefetch=0))
    return emitter.build()


def _loaded(emitter: Emitter, block: int) -> Visit:
    """Read a block's state, and make of it what the plan keeps elsewhere."""
    model, visit, place = emitter.model, Visit(), emitter.model.place(block)
    target = None
    if place.weights == "ram":
        target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, block)
    elif place.weights == "disk" or (model.on_device(block) and not model.master_is_weights(block)):
        target = emitter.ram(BufferKind.WEIGHTS, model.weight_bytes[block], block)
    state = emitter.resident(BufferKind.STATE, Tier.RAM, block) if model.holds_state(block) else None
    chunks = model.chunks(block)
    alone = [range(part, part + 1) for part in range(len(chunks))]
    for parts in alone if state is None else model.runs(block):
        slots, total = emitter.slots(block, parts)
        where = state
        if where is None:
            where = emitter.ram(BufferKind.STATE_CHUNK, total, block, part=parts.start)

        def read(s: int = total, a: list[int] = slots, b: int = where, p: int = parts.start) -> None:
            emitter.disk_task(TaskKind.READ_VERIFIED, s, a, [b], block, part=p)

        def cast(a: int = where, every: range = parts) -> None:
            if target is not None:
                for part in every:
                    emitter.cast(a, target, block, part, chunks[part][1])

        visit.fetch.append(Piece(read, cast))
    if place.weights == "disk" and target is not None:
        visit.after.append(Piece(None, emitter.store_weights(block, target)))
    if model.on_device(block):
        source = state if target is None else target
        if source is None:
            raise ValueError(f"block {block} has no weights to send")
        visit.after = [*visit.after, emitter.renew(block, source)]
    return visit


def build_fill(model: PlannedModel, costs: Costs) -> StepGraph:
    """Inference: read and verify the masters; fill the compute weights kept in RAM."""
    emitter = Emitter(model, costs, 1.0)
    visits = []
    for block in model.blocks:
        if model.plan.placement.weights == "ram":
            target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, block.index)
            visits.append(Visit(fetch=emitter.master_stream(block.index, target)))
    arrange(visits, Io(prefetch=0))
    return emitter.build()


def build_commit(model: PlannedModel, costs: Costs, snapshot: bool = False) -> StepGraph:
    """Make the state durable as it is (no update pending).

    Args:
        snapshot: write what is stored to a snapshot too; with state in RAM.
    """
    emitter = Emitter(model, costs, 1.0, snapshot)
    visit = Visit(after=emitter.commit())
    arrange([visit], Io(prefetch=0))
    return emitter.build()


def build_evaluate(
    model: PlannedModel, costs: Costs, mean_length: float, micro_tokens: tuple[int, ...]
) -> StepGraph:
    """Loss of some micro-batches, breadth-first, nothing kept.

    Args:
        micro_tokens: most tokens of each micro-batch.
    """
    emitter = Emitter(model, costs, mean_length)
    head = len(model.blocks) - 1
    inputs = {
        (block.index, micro): emitter.work(BufferKind.INPUT, model.input_bytes(tokens), block.index, micro)
        for block in model.blocks
        if block.kind in ("layer", "head")
        for micro, tokens in enumerate(micro_tokens)
    }
    experts, vocabulary = ExpertTasks(emitter), VocabularyTasks(emitter)

    def run(block: int, micro: int, weights: list[int]) -> None:
        tokens, kind = micro_tokens[micro], model.blocks[block].kind
        if kind == "embed":
            out = inputs[model.following(block), micro]
            reads = weights if block == 0 else [*weights, out]
            emitter.compute(TaskKind.EMBED_FORWARD, tokens, reads, [out], block, micro)
            return
        out = inputs.get((model.following(block), micro), -1)
        if model.blocks[block].kind == "experts":
            experts.forward(block, micro, tokens, weights, out, keep=False)
            return
        reads = [*weights, inputs[block, micro]]
        if block == head:
            emitter.compute(TaskKind.HEAD_EVALUATE, tokens, reads, [], block, micro)
            return
        routes = model.works.experts(block) is not None
        task = TaskKind.ROUTE_FORWARD if routes else TaskKind.LAYER_FORWARD
        writes = experts.opened(block, micro, tokens) if routes else [out]
        writes += emitter.saved(block, tokens, micro)
        emitter.compute(task, tokens, reads, writes, block, micro)

    def score(part: int, micro: int, weights: list[int]) -> None:
        tokens = micro_tokens[micro]
        vocabulary.score(part, micro, tokens, [*weights, inputs[head, micro]])
        if part == model.head_parts[-1]:
            vocabulary.tally(micro, tokens)

    _forward_all(emitter, range(len(micro_tokens)), run, score)
    return emitter.build()


def build_decode(model: PlannedModel, costs: Costs, new_tokens: int, most_tokens: int) -> StepGraph:
    """Run `new_tokens` tokens (a prompt, or one) after those in the cache; logits of the last.

    Keys and values of `most_tokens` positions per layer and the logits persist from graph to
    graph of one generation, right above the run's own residents.
    """
    emitter = Emitter(model, costs, float(most_tokens))
    head, shape, types = len(model.blocks) - 1, model.decoder, model.types
    tier = emitter.near
    offset = emitter.start[tier]
    layers = [block.index for block in model.blocks if block.kind == "layer"]
    caches = {}
    for block in layers:
        size = bodies.cache_spec(shape.layer(block), most_tokens, types).bytes
        caches[block] = emitter.builder.buffer(BufferKind.KV, tier, size, at=offset, block=block)
        offset += round_up(size, PAGE)
    logits = emitter.builder.buffer(BufferKind.LOGITS, tier, 4 * shape.vocab, at=offset, block=head)
    emitter.start[tier] = offset + round_up(4 * shape.vocab, PAGE)
    inputs = {
        block: emitter.work(BufferKind.INPUT, model.input_bytes(new_tokens), block, 0)
        for block in [*layers, head]
    }
    experts = ExpertTasks(emitter)

    def run(block: int, micro: int, weights: list[int]) -> None:
        if model.blocks[block].kind == "embed":
            out = inputs[model.following(block)]
            reads = weights if block == 0 else [*weights, out]
            emitter.compute(TaskKind.EMBED_DECODE, new_tokens, reads, [out], block, micro)
            return
        moving = model.weight_bytes[block] / emitter.computing.memory_bytes
        if model.blocks[block].kind == "experts":
            out = inputs[model.following(block)]
            experts.forward(block, micro, new_tokens, weights, out, keep=False, seconds=moving)
            return
        reads = [*weights, inputs[block]]
        if block == head:
            head_decode(block, micro, weights)
            return
        layer = shape.layer(block)
        scratch = emitter.scratch(bodies.decode_scratch(layer, new_tokens, most_tokens, types), block, micro)
        routes = layer.experts is not None
        outputs = experts.opened(block, micro, new_tokens) if routes else [inputs[model.following(block)]]
        emitter.task(
            TaskKind.ROUTE_DECODE if routes else TaskKind.LAYER_DECODE,
            model.works.seconds(
                TaskKind.LAYER_FORWARD, block, new_tokens, emitter.computing, emitter.mean_length
            )
            + moving,
            [*reads, caches[block]],
            [*outputs, caches[block], scratch],
            block,
            micro,
            workspace=bodies.layer_workspace(layer, most_tokens, types),
            near=True,
        )

    def head_decode(block: int, micro: int, weights: list[int]) -> None:
        """The head, or a part of it."""
        rows = len(model.blocks[block].tokens) or shape.vocab
        scratch = emitter.scratch(bodies.head_decode_scratch(shape, rows, types), block, micro)
        moved = rows * shape.hidden * ITEMSIZE[types.compute]
        seconds = emitter.computing.compute(bodies.head_flops(shape, 1, rows), moved=moved)
        reads = [*weights, inputs[head]]
        emitter.task(TaskKind.HEAD_DECODE, seconds, reads, [logits, scratch], block, micro, near=True)

    _forward_all(emitter, range(1), run, head_decode)
    return emitter.build()


Run = Callable[[int, int, list[int]], None]
"""Computes (block, micro-batch, weights)."""


def _forward_all(emitter: Emitter, micros: range, run: Run, run_part: Run) -> None:
    """Every block once over all micro-batches, weights fetched ahead.

    Args:
        run_part: for a part of the head's matrix, with the weights of the part and of the norm.
    """
    model = emitter.model
    visits = []
    for block in model.blocks:
        if model.cut and block.kind in ("logits", "head"):
            continue
        visit = Visit()
        visit.fetch, weights = emitter.weights(block.index)
        if block.shared is not None:
            stream, more = emitter.weights(block.shared)
            visit.fetch = [*visit.fetch, *stream]
            weights = [*weights, *more]
        visit.compute = [partial(run, block.index, micro, weights) for micro in micros]
        visits.append(visit)
    norm_fetch, norm = emitter.weights(len(model.blocks) - 1) if model.cut else ([], [])
    for part in model.head_parts if model.cut else ():
        fetch, own = emitter.weights(part)
        visit = Visit(fetch=[*norm_fetch, *fetch])
        visit.compute = [partial(run_part, part, micro, [*own, *norm]) for micro in micros]
        visits.append(visit)
        norm_fetch = []
    arrange(visits, model.plan.io, ahead(model.plan))
