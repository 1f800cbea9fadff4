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
from packmule.graph.training import Visit, arrange
from packmule.shapes import bodies
from packmule.shapes.layout import PAGE, round_up
from packmule.spec.plan import Io


def build_load(model: PlannedModel, costs: Costs) -> StepGraph:
    """Read and verify every slot; fill what the plan keeps in RAM or in work.bin."""
    emitter = Emitter(model, costs, 1.0)
    place = model.plan.placement
    visits = []
    for block in model.blocks:
        index = block.index
        visit = Visit()
        target = None
        if place.weights == "ram":
            target = emitter.resident(BufferKind.WEIGHTS, Tier.RAM, index)
        elif place.weights == "disk":
            target = emitter.ram(BufferKind.WEIGHTS, model.weight_bytes[index], index)
        state = emitter.resident(BufferKind.STATE, Tier.RAM, index) if place.state == "ram" else None
        for part, (_, size) in enumerate(model.chunks(index)):
            total = size * len(model.planes)
            slot = emitter.resident(BufferKind.SLOT, Tier.SLOTS, index, part)
            where = state
            if where is None:
                where = emitter.ram(BufferKind.STATE_CHUNK, total, index, part=part)

            def read(s: int = total, a: int = slot, b: int = where, i: int = index, p: int = part) -> None:
                emitter.disk_task(TaskKind.READ_STATE, s, [a], [b], i, part=p)

            def cast(
                a: int = where, b: int | None = target, i: int = index, p: int = part, s: int = size
            ) -> None:
                if b is not None:
                    emitter.cast(a, b, i, p, s)

            visit.fetch.append(Piece(read, cast))
        if place.weights == "disk" and target is not None:
            visit.after.append(Piece(None, emitter.store_weights(index, target)))
        visits.append(visit)
    arrange(visits, Io(prefetch=0))
    return emitter.build()


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
        (block.index, micro): emitter.ram(BufferKind.INPUT, model.input_bytes(tokens), block.index, micro)
        for block in model.blocks
        if block.kind in ("layer", "head")
        for micro, tokens in enumerate(micro_tokens)
    }
    experts = ExpertTasks(emitter)

    def run(block: int, micro: int, weights: list[int]) -> None:
        tokens = micro_tokens[micro]
        if block == 0:
            emitter.compute(TaskKind.EMBED_FORWARD, tokens, weights, [inputs[1, micro]], 0, micro)
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
        kind = TaskKind.ROUTE_FORWARD if routes else TaskKind.LAYER_FORWARD
        writes = experts.opened(block, micro, tokens) if routes else [out]
        writes += emitter.saved(block, tokens, micro)
        emitter.compute(kind, tokens, reads, writes, block, micro)

    _forward_all(emitter, range(len(micro_tokens)), run)
    return emitter.build()


def build_decode(model: PlannedModel, costs: Costs, new_tokens: int, most_tokens: int) -> StepGraph:
    """Run `new_tokens` tokens (a prompt, or one) after those in the cache; logits of the last.

    Keys and values of `most_tokens` positions per layer and the logits persist from graph to
    graph of one generation, right above the run's own residents.
    """
    emitter = Emitter(model, costs, float(most_tokens))
    head, shape, types = len(model.blocks) - 1, model.decoder, model.types
    offset = emitter.start[Tier.RAM]
    layers = [block.index for block in model.blocks if block.kind == "layer"]
    caches = {}
    for block in layers:
        size = bodies.cache_spec(shape.layer(block), most_tokens, types).bytes
        caches[block] = emitter.builder.buffer(BufferKind.KV, Tier.RAM, size, at=offset, block=block)
        offset += round_up(size, PAGE)
    logits = emitter.builder.buffer(BufferKind.LOGITS, Tier.RAM, 4 * shape.vocab, at=offset, block=head)
    emitter.start[Tier.RAM] = offset + round_up(4 * shape.vocab, PAGE)
    inputs = {
        block: emitter.ram(BufferKind.INPUT, model.input_bytes(new_tokens), block, 0)
        for block in [*layers, head]
    }
    experts = ExpertTasks(emitter)

    def run(block: int, micro: int, weights: list[int]) -> None:
        if block == 0:
            emitter.core_task(TaskKind.EMBED_DECODE, costs.task_seconds, weights, [inputs[1]], 0, micro)
            return
        moving = model.weight_bytes[block] / costs.memory_bytes
        if model.blocks[block].kind == "experts":
            out = inputs[model.following(block)]
            experts.forward(block, micro, new_tokens, weights, out, keep=False, seconds=moving)
            return
        reads = [*weights, inputs[block]]
        if block == head:
            scratch = emitter.scratch(bodies.head_decode_scratch(shape, types), block, micro)
            seconds = costs.compute(bodies.head_flops(shape, 1), moved=model.weight_bytes[0])
            emitter.core_task(TaskKind.HEAD_DECODE, seconds, reads, [logits, scratch], block, micro)
            return
        layer = shape.layer(block)
        scratch = emitter.scratch(bodies.decode_scratch(layer, new_tokens, most_tokens, types), block, micro)
        routes = layer.experts is not None
        seconds = model.works.seconds(TaskKind.LAYER_FORWARD, block, new_tokens, costs, emitter.mean_length)
        outputs = experts.opened(block, micro, new_tokens) if routes else [inputs[model.following(block)]]
        emitter.core_task(
            TaskKind.ROUTE_DECODE if routes else TaskKind.LAYER_DECODE,
            model.works.seconds(TaskKind.LAYER_FORWARD, block, new_tokens, costs, emitter.mean_length)
            + moving,
            [*reads, caches[block]],
            [*outputs, caches[block], scratch],
            block,
            micro,
            workspace=bodies.layer_workspace(layer, most_tokens, types),
        )

    _forward_all(emitter, range(1), run)
    return emitter.build()


def _forward_all(emitter: Emitter, micros: range, run: Callable[[int, int, list[int]], None]) -> None:
    """Every block once over all micro-batches, weights fetched ahead."""
    model = emitter.model
    visits = []
    for block in model.blocks:
        visit = Visit()
        visit.fetch, weights = emitter.weights(block.index)
        if block.shared is not None:
            stream, more = emitter.weights(block.shared)
            visit.fetch = [*visit.fetch, *stream]
            weights = [*weights, *more]
        visit.compute = [partial(run, block.index, micro, weights) for micro in micros]
        visits.append(visit)
    arrange(visits, model.plan.io)
