"""Every plan worth looking at: the discrete choices, less what another always beats."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from packmule.plan.bounds import Sizes, covering
from packmule.plan.situation import Situation
from packmule.shapes.bodies import DTYPES
from packmule.shapes.layout import ITEMSIZE
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape, Shape
from packmule.shapes.state import STATES
from packmule.spec.plan import DevicePlan, Io, Numerics, Placement, Plan, Precision, Update

LOSS_CHUNKS = (512, 128)
PART_BYTES = (16 << 20, 64 << 20)
"""Most bytes of one plane of a part of the vocabulary, where it is cut: as the largest layer has,
between these. Smaller parts need less memory and hardly more time."""
CHUNK_BYTES = (4 << 20, 1 << 20)

MOST_READ_AHEAD = 64 << 20
"""Bytes of one plane that are read ahead at most."""


def splits(rows: int, wanted: int | None) -> list[tuple[int, ...]]:
    """Ways to cut a global batch into micro-batches as equal as can be, largest first."""
    if wanted is not None:
        counts = [-(-rows // wanted)]
    else:
        counts = sorted({min(rows, 1 << power) for power in range(rows.bit_length() + 1)})
    found = []
    for count in counts:
        small, more = divmod(rows, count)
        found.append(tuple(small + (index < more) for index in range(count)))
    return found


def streams(placement: Placement) -> bool:
    """Whether anything lies on disk between its uses."""
    return "disk" in (placement.state, placement.weights, placement.gradients, placement.inputs)


def numerics_choices(situation: Situation) -> list[Numerics]:
    """Numerics the search may choose from; one when they are fixed."""
    base = situation.numerics
    if situation.fixed:
        return [base]
    choices = []
    shape = situation.shape
    for micro_rows in splits(base.rows, situation.micro_rows):
        if isinstance(shape, ModuleShape):  # whose head's losses exist at once
            if max(micro_rows) <= shape.most_rows:
                choices.append(base.model_copy(update={"micro_rows": micro_rows, "loss_chunk": 1}))
            continue
        tokens = max(micro_rows) * base.max_seq_length
        chunks = sorted({min(chunk, tokens) for chunk in LOSS_CHUNKS}, reverse=True)
        known = situation.vocabulary_parts
        for parts in cuts(shape, base) if known is None else [known]:
            # A part's logits are few: a chunk need not be short as well.
            for chunk in chunks if parts == 1 else chunks[:1]:
                changes = {"micro_rows": micro_rows, "loss_chunk": chunk, "vocabulary_parts": parts}
                choices.append(base.model_copy(update=changes))
    return choices


def cuts(shape: ModelShape, numerics: Numerics) -> list[int]:
    """Into how many parts a vocabulary may be cut: one, or as many as make them small."""
    return sorted({1, 1 if keeps_whole(numerics) else _parts(shape, numerics.precision)})


def keeps_whole(numerics: Numerics) -> str | None:
    """Why a vocabulary may not be cut, if so: the key that says so, and what it does."""
    if numerics.turns is not None:
        return f"`optim.block_schedule` = {numerics.turns.method!r} (a group is made of whole blocks)"
    if STATES[numerics.optimizer.rule].whole:  # its means over a part are not those over the tensor
        return f"`optim.optim` = {numerics.optimizer.rule!r} (it looks at whole tensors)"
    return None


def why_uncut(shape: Shape, numerics: Numerics) -> str | None:
    """A sentence on why a large vocabulary is not cut into parts; None where it is, or is not large."""
    because = keeps_whole(numerics)
    if because is None or not isinstance(shape, ModelShape) or _parts(shape, numerics.precision) == 1:
        return None
    return f"Its vocabulary would need less in parts, which are not offered with {because}."


def _parts(shape: ModelShape, precision: Precision) -> int:
    master = DTYPES[precision].master
    table = shape.vocab * shape.hidden * ITEMSIZE[master]
    layer = max(block.layout(master).bytes for block in shape.blocks() if block.layer >= 0)
    least, most = PART_BYTES
    return -(-table // min(max(layer, least), most))


def placements(situation: Situation, update: Update, numerics: Numerics) -> list[Placement]:
    """Placements that are not beaten by another one in both memory and time."""
    wishes, low_precision = situation.wishes, numerics.precision == "bf16-mixed"
    # Of a tied vocabulary in parts, the head's gradients wait for the embedding's.
    cut = numerics.vocabulary_parts > 1
    waits, free = cut and situation.shape.tied, cut and situation.vocabulary_parts is None
    found = []
    near = ("ram",) if situation.device is None else ("device", "ram")
    for state, weights, gradients, inputs in product(
        ("ram", "disk"), ("state", "ram", "disk"), ("ram", "disk"), (*near, "disk")
    ):
        asked = (wishes.state, wishes.weights, wishes.gradients, wishes.inputs)
        if any(
            wish not in ("auto", got)
            for wish, got in zip(asked, (state, weights, gradients, inputs), strict=True)
        ):
            continue
        open_weights, open_inputs = wishes.weights == "auto", wishes.inputs == "auto"
        if (
            not low_precision
            and weights != "state"
            and (state == "ram" or weights == "disk")
            and open_weights
        ):
            continue  # the master plane is the compute weights
        if state == "ram" and weights == "disk" and open_weights:
            continue  # a cast is cheaper than a read
        if state == "ram" and inputs == "disk" and open_inputs:
            continue  # state is the bigger saving
        if update == "on-backward" and gradients == "disk" and not waits:
            continue  # nothing to keep
        if free and state == "ram" and wishes.state == "auto":
            continue  # all of the vocabulary is in RAM anyway
        kept = gradients == "ram" and (update != "on-backward" or waits)
        if free and kept and wishes.gradients == "auto":
            continue  # all of its gradient is
        found.append(Placement(state=state, weights=weights, gradients=gradients, inputs=inputs))
    return found


def updates(situation: Situation) -> list[Update]:
    """Update modes that a job may have."""
    modes: list[Update] = ["on-backward", "after-backward"]
    if situation.numerics.turns is None:
        modes.append("on-fetch")
    return [mode for mode in modes if situation.update in (None, mode)]


def allowed(plan: Plan) -> bool:
    """Combinations the builder does not offer, by the table in docs/design.md."""
    many = len(plan.numerics.micro_rows) > 1
    if plan.numerics.turns and (plan.update == "on-fetch" or plan.placement.gradients == "disk"):
        return False  # one group's gradient, used before the next group's turn
    if plan.numerics.vocabulary_parts > 1 and keeps_whole(plan.numerics):
        return False
    if plan.device is None and (plan.placement.inputs == "device" or plan.placement.device_weights):
        return False
    if plan.device_updates and (plan.device is None or STATES[plan.numerics.optimizer.rule].whole):
        return False  # chunks are not whole tensors
    place, late = plan.placement, plan.update == "on-fetch" and plan.numerics.clip is not None
    if plan.speculate and (not late or place.state == "ram" or place.kept_state or plan.order == "depth"):
        return False  # nothing to foresee, or what was updated could not be read again
    if plan.order == "depth" and not many:
        return False  # the same as breadth
    if plan.order == "depth" and plan.update == "on-backward":
        return False
    if plan.order == "depth" and plan.numerics.vocabulary_parts > 1:
        return False  # all parts' gradients would be held
    # Depth-first: an accumulating gradient is in use until the last micro-batch.
    return not (plan.order == "depth" and plan.placement.gradients == "disk")


def balances(shape: Shape, plan: Plan) -> bool:
    """Whether a plan can balance experts, where they are to be. How much work each expert got must be
    known for the whole step before the first backward: depth-first plans learn it too late."""
    layers = shape.layer_shapes if isinstance(shape, ModelShape) else ()
    wanted = any(layer.experts and layer.experts.balance for layer in layers)
    return not wanted or plan.order == "breadth"


def recompute_choices(layers: int, wanted: bool | None) -> list[tuple[bool, ...]]:
    """How many of the last layers keep their activations (their lives are the shortest)."""
    if wanted is not None:
        return [(wanted,) * layers]
    kept = sorted({layers, (3 * layers) // 4, layers // 2, layers // 4, 0}, reverse=True)
    return [(True,) * (layers - count) + (False,) * count for count in kept]


def candidates(situation: Situation) -> Iterator[Plan]:
    """Plans without predictions, in a fixed order."""
    device = None
    if situation.device is not None:
        device = DevicePlan(name=situation.device.name, memory_bytes=situation.device_bytes)
    for numerics, update in product(numerics_choices(situation), updates(situation)):
        sizes = Sizes.of(situation.shape, numerics)
        for placement in placements(situation, update, numerics):
            orders = ("breadth", "depth")
            for order, recompute in product(
                orders, recompute_choices(situation.shape.layers, situation.recompute)
            ):
                plan = Plan(
                    budget_bytes=situation.budget_bytes,
                    numerics=numerics,
                    placement=placement,
                    device=device,
                    order=order,
                    recompute=recompute,
                    update=update,
                    io=Io(prefetch=1),
                    checkpoint=situation.checkpoint,
                )
                if not (allowed(plan) and balances(situation.shape, plan)):
                    continue
                for io in _cuts(plan, sizes):
                    cut = _with_split(plan.model_copy(update={"io": io}))
                    yield cut
                    ahead = cut.model_copy(update={"speculate": True})
                    # To take updates back, HEAD must name what every step began with.
                    every = situation.commit_auto or plan.checkpoint.commit_steps == 1
                    if every and cut.io.prefetch and allowed(ahead):
                        yield ahead


def _with_split(plan: Plan) -> Plan:
    """The plan with the split of its updates that its numerics have, if any."""
    split = plan.numerics.shared_updates
    if split is None:
        return plan
    io = plan.io.model_copy(update={"chunk_bytes": split.chunk_bytes})
    return plan.model_copy(update={"io": io, "device_updates": split.percent})


def _cuts(plan: Plan, sizes: Sizes) -> list[Io]:
    """The usual cut of the streams, one that hides updates behind the computation, and the leanest; the
    search tries others on what it has found."""
    if not streams(plan.placement):
        return [plan.io]
    found = [plan.io]
    chunks = min(covering(plan, sizes), MOST_READ_AHEAD // plan.io.chunk_bytes)
    if plan.placement.state == "disk" and plan.update != "after-backward" and chunks > plan.io.read_ahead:
        found.append(plan.io.model_copy(update={"read_ahead": chunks}))
    return [*found, Io(prefetch=0, chunk_bytes=min(CHUNK_BYTES))]
