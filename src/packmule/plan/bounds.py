"""Lower bounds on a plan's memory and step time: cheap reasons not to simulate it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from packmule.graph.costs import Costs
from packmule.graph.kinds import TaskKind
from packmule.graph.model import PlannedModel
from packmule.graph.work import works_of
from packmule.shapes import bodies, experts, vocabulary
from packmule.shapes.layout import TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.shapes.module import Shape
from packmule.shapes.state import state_bytes
from packmule.spec.plan import Numerics, Placement, Plan, RuleName

HARD_TO_HIDE = 0.1
"""Share of the disk's time beside the cores that is taken to be exposed all the same."""


@dataclass(frozen=True)
class Sizes:
    """Per-model bytes that depend on the plan's numerics only.

    Attributes:
        planes, weights, state: of each block: one plane, the compute weights, all planes.
    """

    planes: tuple[int, ...]
    weights: tuple[int, ...]
    state: tuple[int, ...]

    @classmethod
    def of(cls, shape: Shape, numerics: Numerics) -> Sizes:
        """Of a model under these numerics."""
        return _sizes(shape.cut(numerics.vocabulary_parts), numerics.precision, numerics.optimizer.rule)


@lru_cache(maxsize=256)
def _sizes(shape: Shape, precision: str, rule: RuleName) -> Sizes:
    types, blocks = bodies.DTYPES[precision], shape.blocks()
    return Sizes(
        tuple(block.layout(types.master).bytes for block in blocks),
        tuple(block.layout(types.compute).bytes for block in blocks),
        tuple(state_bytes(rule, block, types.master) for block in blocks),
    )


def ram_bound(shape: Shape, plan: Plan) -> int:
    """Bytes of the arena that no arrangement of this plan's buffers can avoid."""
    if plan.device is None:
        return _memory_bound(shape, plan)
    sizes, place = Sizes.of(shape, plan.numerics), plan.placement
    resident = sum(sizes.state) if place.state == "ram" else 0
    held = place.gradients == "ram" and plan.update != "on-backward" and not plan.numerics.turns
    if plan.numerics.turns or (plan.device_updates and not held):
        return resident  # of a block that both update, chunks of the gradient come to RAM
    return resident + (sum(sizes.planes) if held else max(sizes.planes))


def device_bound(shape: Shape, plan: Plan) -> int:
    """Bytes of a device's memory that none can avoid: what a streamed plan without a device that updates on
    the way has in RAM; and weights that stay, of which one may be those in use."""
    inputs = "ram" if plan.placement.inputs == "device" else "disk"
    place = Placement(state="disk", weights="state", gradients=plan.placement.gradients, inputs=inputs)
    without = {"device": None, "device_updates": 0, "update": "on-backward", "placement": place}
    alike = plan.model_copy(update=without)
    model, weights = PlannedModel(shape, plan), Sizes.of(shape, plan.numerics).weights
    stay = [weights[block] for block in range(len(weights)) if model.on_device(block)]
    users = 2 * max(weights)  # a tied head reads the embedding's too
    return max(0, _memory_bound(shape, alike) - (users if stay else 0)) + sum(stay)


def _memory_bound(shape: Shape, plan: Plan) -> int:
    types, place, numerics = bodies.dtypes(plan.numerics), plan.placement, plan.numerics
    model, sizes = PlannedModel(shape, plan), Sizes.of(shape, numerics)
    shape = model.shape
    works = works_of(shape, types, numerics.loss_chunk, sizes.planes)
    hidden = shape.hidden if isinstance(shape, ModelShape) else 0  # only experts ask
    tokens = max(numerics.micro_tokens)
    step_tokens = sum(numerics.micro_tokens) if plan.order == "breadth" else tokens
    total, last = sum(sizes.planes), len(sizes.planes) - 1
    resident = sum(sizes.state) if place.state == "ram" else 0
    resident += sum(sizes.weights) if place.weights == "ram" else 0
    alias = place.state == "ram" and place.weights == "state" and types.compute == types.master
    own_weights = 0 if alias or place.weights == "ram" else 1
    # Gradients alive at the head, at the last layer and at the first: those of blocks not yet done
    # with. A tied embedding's begins at the head, another's after the last layer.
    # Those of its parts that go to disk in between are there one by one.
    gathers = shape.tied and not model.halved(0)
    table = sum(sizes.planes[block] for block in model.embedding)
    embedding = table if gathers else 0
    openings = [block.index for block in shape.blocks() if block.kind == "layer"]
    head_planes = sum(sizes.planes[block.index] for block in shape.blocks() if block.layer < 0) - table
    at_head = sizes.planes[last] + embedding
    if model.cut:
        at_head = embedding or sizes.planes[model.head_parts[0]]
    at_last, at_first = sizes.planes[openings[-1]] + embedding, sizes.planes[openings[0]] + embedding
    last_group = max(block.index for block in shape.blocks() if block.layer >= 0)
    at_group = sizes.planes[last_group] + embedding
    at_end = embedding or sizes.planes[0]
    if place.gradients == "ram" and plan.update == "on-fetch":
        at_head = at_group = at_last = at_first = at_end = total
    elif place.gradients == "ram" and plan.update == "after-backward":
        at_first, at_end = total - table + embedding, total
        at_last += head_planes
        at_group += head_planes
        if model.cut and not shape.tied:
            at_head = head_planes - sizes.planes[last]
        if plan.order == "depth" and numerics.micro_tokens.count(tokens) > 1:
            at_head = at_group = at_last = at_first  # from the second micro-batch on all are there
    if numerics.turns:  # of one group, and which ones are there at the peak depends on it
        at_head = at_group = at_last = at_first = at_end = 0
    stream = shape.stream_bytes(tokens, types)
    layer_inputs = shape.stream_bytes(step_tokens, types)
    inputs = layer_inputs * shape.layers if place.inputs == "ram" else stream
    kept_saved = kept_experts = 0
    for _, indices in shape.layer_groups:
        block = openings[indices[0]]
        kept = sum(not plan.recompute[index] for index in indices) * (step_tokens // tokens)
        kept_saved += kept * works.saved(block, tokens)
        own = works.experts(block)
        if own is not None:
            kept_experts += kept * _bytes(experts.experts_saved, own, tokens, types)
            if place.inputs == "ram":
                where = _bytes(experts.routed, own, hidden, tokens, types)
                inputs += where * len(indices) * (step_tokens // tokens)
    head = inputs + kept_saved + kept_experts + at_head
    if model.cut:
        if place.inputs == "disk":
            head -= inputs  # there may be time to write all of them
        part = model.head_parts[0]
        summed = _bytes(vocabulary.gathered, hidden, step_tokens, types)
        head += layer_inputs + summed + works.scratch(TaskKind.PART_GRADIENT, part, tokens)
        head += own_weights * (sizes.weights[part] + sizes.weights[last])
        from_disk = "disk" in (place.state, place.weights)  # else the cores cast them, in their own order
        if plan.io.prefetch and from_disk and len(model.head_parts) > 2:
            # The next part is fetched while the one before is stored or updated.
            least = model.head_parts[-1]
            head += own_weights * sizes.weights[least]
            held = place.gradients == "ram" and plan.update != "on-backward"
            head += 0 if held or embedding else sizes.planes[least]
    else:
        users = (last, 0) if shape.tied else (last,)
        head += stream + works.scratch(TaskKind.HEAD_LOSS, last, tokens)
        head += own_weights * sum(sizes.weights[b] for b in users)

    def at_layer(block: int) -> tuple[int, int]:
        """(saved, the rest) at a layer's backward; gradients of all micro-batches' outputs are there."""
        rest = works.scratch(TaskKind.LAYER_BACKWARD, block, tokens) + layer_inputs
        return works.saved(block, tokens), rest + own_weights * sizes.weights[block]

    def at_experts(block: int) -> int:
        """Everything at the backward of the last layer's last group of experts; 0: it has none."""
        own = works.experts(block)
        if own is None:
            return 0
        kept = not plan.recompute[-1]
        rest = _bytes(bodies.experts_scratch, own, hidden, tokens, types, True, kept)
        rest += _bytes(experts.dispatched, own, hidden, tokens, types) + stream
        return rest + inputs + kept_saved + kept_experts + own_weights * sizes.weights[block] + at_group

    (saved_last, layer_last), (saved_first, layer_first) = at_layer(openings[-1]), at_layer(openings[0])
    moments = (
        head,
        at_experts(last_group),
        layer_last + inputs + max(saved_last, kept_saved) + at_last,
        layer_first + stream + saved_first + at_first,
        at_end,
    )
    return resident + max(moments)


@lru_cache(maxsize=4096)
def _bytes(make: Callable[..., tuple[TensorSpec, ...]], *arguments: Hashable) -> int:
    """Bytes of a list of tensors; candidates ask for the same few again and again."""
    return layout(make(*arguments)).bytes


class Busy(NamedTuple):
    """Seconds that a step's resources are busy; no step is shorter than any.

    Attributes:
        cores, disk: each in all.
        device, link: a device's computation, and the busier direction of its link; the cores update then.
        alone: of the disk's, those in which the cores have little to do: transfers of updates after the
            last backward, or of more than is read ahead; or all, where nothing is fetched ahead.
    """

    cores: float
    disk: float
    alone: float
    device: float = 0.0
    link: float = 0.0

    @property
    def estimate(self) -> float:
        """What a step may take, to order plans by."""
        hidden = self.disk - self.alone
        busiest = max(self.cores, self.device, self.link, hidden)
        return self.alone + busiest + HARD_TO_HIDE * (hidden + self.link)


def _shares(groups: tuple[tuple[int, ...], ...], blocks: int) -> tuple[list[float], list[float]]:
    """Per block, shares of the steps in which (a backward passes it, it is trained)."""
    if not groups:
        return [1.0] * blocks, [1.0] * blocks
    passed = [sum(group[0] <= block for group in groups) / len(groups) for block in range(blocks)]
    return passed, [sum(block in group for group in groups) / len(groups) for block in range(blocks)]


def seconds_bound(shape: Shape, plan: Plan, costs: Costs, mean_length: float) -> Busy:
    """How long a plan's step keeps the cores and the disk busy. Where groups take turns, the mean over
    them."""
    numerics, place = plan.numerics, plan.placement
    types = bodies.dtypes(numerics)
    model, sizes = PlannedModel(shape, plan), Sizes.of(shape, numerics)
    shape, last = model.shape, len(sizes.planes) - 1
    works = works_of(shape, types, numerics.loss_chunk, sizes.planes)
    openings = [block.index for block in shape.blocks() if block.kind == "layer"]
    twice = plan.update == "on-backward" and numerics.clip is not None
    passed, trained = _shares(model.groups, len(sizes.planes))
    cores, cpu = 0.0, costs
    if plan.device is not None and costs.device is not None:
        costs = costs.device.compute
    for tokens in numerics.micro_tokens:

        def seconds(kind: TaskKind, block: int, tokens: int = tokens) -> float:
            return works.seconds(kind, block, tokens, costs, mean_length)

        def backward(
            kind: TaskKind, blocks: Sequence[int], recompute: bool = True, tokens: int = tokens
        ) -> float:
            """Of some blocks that are alike."""
            if not blocks:
                return 0.0
            frozen, whole = (
                works.seconds(kind, blocks[0], tokens, costs, mean_length, recompute, one)
                for one in (True, False)
            )
            learning = sum(trained[block] for block in blocks)
            return sum(passed[block] for block in blocks) * frozen + learning * (whole - frozen)

        for _, indices in shape.layer_groups:
            block = openings[indices[0]]
            cores += len(indices) * seconds(TaskKind.LAYER_FORWARD, block)
            for again in (False, True):
                some = [openings[index] for index in indices if plan.recompute[index] == again]
                cores += backward(TaskKind.LAYER_BACKWARD, some, again)
            if twice:
                cores += backward(TaskKind.LAYER_BACKWARD, [openings[index] for index in indices])
            own = works.experts(block)
            if own is not None and isinstance(shape, ModelShape):
                layer = shape.layer(block)
                shares = [passed[openings[index]] + trained[openings[index]] for index in indices]
                runs = 1 + sum(shares) / len(shares)
                matmul = runs * bodies.experts_flops(layer, tokens, own.count)
                moved = runs * bodies.experts_moved(layer, tokens, types, own.count)
                cores += len(indices) * costs.compute(matmul, moved=moved)
        embed = model.embedding[-1]
        ends = sum(trained[block] for block in model.embedding) * seconds(TaskKind.EMBED_BACKWARD, embed)
        ends += backward(TaskKind.HEAD_CLOSE if model.cut else TaskKind.HEAD_LOSS, [last])
        cores += len(model.embedding) * seconds(TaskKind.EMBED_FORWARD, embed)
        if model.cut:
            # Parts are as equal as can be, the last one no larger than any but for learned positions.
            count, two = len(model.head_parts), (model.head_parts[0], model.head_parts[-1])
            ends += count * min(seconds(TaskKind.PART_GRADIENT, part) for part in two)
            cores += count * min(seconds(TaskKind.PART_SCORE, part) for part in two)
        cores += ends * (2 if twice else 1)
    total, state = (
        sum(share * size for share, size in zip(trained, per_block, strict=True))
        for per_block in (sizes.planes, sizes.state)
    )
    shared = [
        sum(model.chunks(block)[part][1] for part in model.updates_there(block)) * trained[block]
        for block in range(len(sizes.planes))
    ]
    there, moving = sum(shared), sum(shared) * len(model.planes)
    update = cpu.compute(moved=2 * (state - moving) + 1.5 * (total - there))
    device, cores = (0.0, cores + update) if plan.device is None else (cores, update)
    if there:
        device += costs.compute(moved=2 * moving + 1.5 * there)
    costs = cpu
    # Layers are fetched twice a pass, embedding and head once, parts of the head's matrix twice but for
    # the last of them; for on-fetch an update serves the first.
    passes = 1 if plan.order == "breadth" else len(numerics.micro_rows)
    once = ("embed", "head")
    times = [(1 if block.kind in once else 1 + passed[block.index]) * passes - 1 for block in shape.blocks()]
    if shape.tied:
        for block in model.embedding:
            times[block] += (2 if model.cut else 1) * passes
    if model.cut:
        times[model.head_parts[-1]] -= passes

    link = 0.0
    stay = [model.on_device(block) for block in range(len(sizes.planes))]
    if plan.device is not None and costs.device is not None:
        reads = [
            share if here else count + 1 for here, share, count in zip(stay, trained, times, strict=True)
        ]
        sent = sum(count * size for count, size in zip(reads, sizes.weights, strict=True))
        received = total
        if there:
            # What is updated there need not be sent to stay or to be used next; its gradient may stay there.
            made = (size / plane for size, plane in zip(sizes.weights, sizes.planes, strict=True))
            sent += moving - sum(part * share for part, share in zip(shared, made, strict=True))
            complete = plan.update == "on-backward"
            sent, received = sent + (0 if complete or plan.speculate else there), received + moving
            received -= there if complete else 0
        link = max(costs.device.send(int(sent)), costs.device.receive(int(received)))

    holds = [model.holds_state(block) for block in range(len(sizes.planes))]
    in_ram = [
        model.place(block).weights == "ram" or (held and place.weights == "state")
        for block, held in enumerate(holds)
    ]
    never = [here or there for here, there in zip(stay, in_ram, strict=True)]
    times = [0.0 if none else max(0.0, count) for none, count in zip(never, times, strict=True)]

    def seconds_on_disk(read: float, written: float) -> float:
        return read / costs.read_bytes + written / costs.write_bytes

    read = written = late_read = late_written = 0.0
    if place.state == "disk":
        written = late_written = state
        read = late_read = sum(
            0.0 if held else share * size
            for held, share, size in zip(holds, trained, sizes.state, strict=True)
        )
        if place.weights == "state":
            read += sum(count * size for count, size in zip(times, sizes.planes, strict=True))
    if place.weights == "disk":
        read += sum(count * size for count, size in zip(times, sizes.weights, strict=True))
        written += sum(share * size for share, size in zip(trained, sizes.weights, strict=True))
    if place.gradients == "disk":
        moved = 0 if plan.update == "on-backward" else total
        late_read += 0 if plan.speculate else moved
        read -= moved if plan.speculate else 0  # they are read only where the step is clipped
        moved += sum(sizes.planes[block] for block in model.embedding if model.halved(block))
        read, written = read + moved, written + moved
    disk = seconds_on_disk(read, written)
    if plan.io.prefetch == 0:
        return Busy(cores, disk, disk, device, link)
    late = updating = seconds_on_disk(late_read, late_written)
    if plan.update != "after-backward":
        late *= 1 - min(1.0, plan.io.read_ahead / covering(plan, sizes))
    if plan.update == "on-fetch" and not plan.speculate:
        # Updates hide behind forward alone, a third of the computation, or a fourth where it runs twice.
        computing = cores if plan.device is None else device
        forward = computing / (3 + sum(plan.recompute) / len(plan.recompute))
        late = max(late, updating - forward)
    return Busy(cores, disk, late, device, link)


def covering(plan: Plan, sizes: Sizes) -> int:
    """Chunks to read ahead so that the updates between two operations of a visit to the largest layer find
    theirs read."""
    operations = len(plan.numerics.micro_rows) if plan.order == "breadth" else 1
    return -(-max(sizes.planes[1:-1]) // (plan.io.chunk_bytes * operations)) + 1
