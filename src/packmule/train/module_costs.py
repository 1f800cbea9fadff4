"""Measuring a user's modules: each kind of block at each size of micro-batch, by running it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import packmule.train.loop  # noqa: F401  (a training child holds it too)
from packmule.errors import ConfigError, DoesNotFit
from packmule.models.modules.bodies import ModuleBodies
from packmule.models.modules.build import Building, Part, buffers
from packmule.models.modules.samples import VALIDATION, Draw, Samples, open_dataset
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.bodies import DTYPES, code_bytes
from packmule.shapes.module import Cost, ModulePart, ModuleShape, ValidationSamples
from packmule.spec.units import format_bytes
from packmule.train.memory import is_out_of_memory, limit_data, process_memory, trim_malloc, untouched_bytes
from packmule.train.messages import GaugeRequest, Sender
from packmule.train.module_subject import tensor_records
from packmule.train.modules import import_from

RUNS = 5
"""Most timed runs of each task, after one that warms caches and one that memory is measured in; the shortest
counts."""

MEASURE_SECONDS = 0.1
"""A task is not run again when its timed runs took more than this together."""

DEARER = 1.1
"""A sample of a larger micro-batch is taken to cost at most so much more than one of the next smaller: what
is measured beyond that is other programs' doing."""

SPARE_BYTES = 1 << 20
"""Added to what was measured: gaps that a heap in use has and a fresh one has not."""

LEAST_BYTES = 8 << 20
"""Room without which nothing is tried: libraries that are refused memory may end the process."""

PRIMITIVE = "could not create a primitive"
"""What oneDNN says when it is refused memory."""

LOOKED_AT = 64
"""Samples that are looked at for the number of targets."""


Settings = dict[tuple[str, str], Any]
"""(module within the block, attribute) -> value."""


class _Kind(NamedTuple):
    """Blocks that are alike: the first one's number and weights, and the shape of a row of its input."""

    block: int
    weights: Mapping[str, Tensor]
    row_shape: tuple[int, ...] | None


def measured(request: GaugeRequest, sender: Sender) -> ModuleShape:
    """Build, run, measure.

    Raises:
        ConfigError: the user's code cannot be used, or failed.
        DoesNotFit: the smallest micro-batch does not fit.
    """
    import_from(request.import_path)
    torch.set_grad_enabled(False)
    torch.set_num_threads(request.threads)
    types = DTYPES[request.precision]
    dataset = open_dataset(request.dataset, request.dataset_arguments, request.seed)
    validation = None
    if request.validation is not None:
        validation = open_dataset(request.validation, request.validation_arguments, request.seed, VALIDATION)
    before = process_memory().resident
    alike: dict[Any, dict[str, Tensor]] = {}
    building = Building(request.model, request.arguments, request.seed, types.compute)
    structures = []
    for part in building:
        structures.append(_structure(part))
        if structures[-1] not in alike:
            dtype = TORCH_DTYPES[types.compute]
            named = part.module.named_parameters()
            alike[structures[-1]] = {name: value.detach().to(dtype, copy=True) for name, value in named}
    del part
    model = building.model
    weights = [alike[structure] for structure in structures]
    looked = looks(structures, [_settings(part) for part in model.parts])
    build_bytes = max(0, process_memory().peak - before)
    trim_malloc()
    bodies = ModuleBodies(model, types, request.seed)
    samples = Samples(dataset, np.arange(len(dataset)), request.seed, model.targets)
    _check_room(request.ram_bytes)
    limit_data(request.ram_bytes, untouched_bytes(request.threads, code_bytes(types)))

    versions = {name: buffer._version for name, buffer in buffers(model)}
    shapes, _ = _chain(bodies, weights, samples, Draw(0, 0))
    judged = samples
    if validation is not None:
        judged = Samples(validation, np.arange(len(validation)), request.seed, model.targets, VALIDATION)
    seen, metrics = _chain(bodies, weights, judged, None)
    refuse_unlike([part.name for part in model.parts], shapes, seen)
    _refuse_changed(versions, dict(buffers(model)))

    numbers: dict[Any, int] = {}
    kinds: list[_Kind] = []
    parts: list[ModulePart] = []
    for block, part in enumerate(model.parts):
        key = (looked[block], shapes[block])
        if key not in numbers:
            numbers[key] = len(kinds)
            kinds.append(_Kind(block, weights[block], shapes[block]))
        out = shapes[block + 1] if block + 1 < len(shapes) else None
        records = tensor_records(part)
        parts.append(ModulePart(name=part.name, kind=numbers[key], row_shape=out or (), parameters=records))
    targets, sample_bytes = _looked_at(samples)
    sample_bytes = max(sample_bytes, _looked_at(judged)[1])
    gc.freeze()  # what is there stays: collecting need not go through it each time
    costs = _costs(bodies, kinds, samples, sorted(request.rows), sender)
    trim_malloc()
    held = sum(value.nbytes for named in alike.values() for value in named.values())
    return ModuleShape(
        factory=request.model,
        arguments=request.arguments,
        dataset=request.dataset,
        dataset_arguments=request.dataset_arguments,
        precision=request.precision,
        samples=len(dataset),
        validation=None
        if request.validation is None
        else ValidationSamples(
            dataset=request.validation, arguments=request.validation_arguments, samples=len(judged)
        ),
        mean_targets=max(1e-9, targets),
        parts=tuple(parts),
        costs=costs,
        build_bytes=build_bytes,
        resident_bytes=max(0, process_memory().resident - held),
        metrics=metrics,
        sample_bytes=sample_bytes,
    )


def _structure(part: Part) -> tuple[object, ...]:
    """What blocks with equal parameters and equal code have in common."""
    classes = tuple(type(module) for module in part.module.modules())
    return (classes, repr(part.module), part.parameters, part.takes_batch)


def _settings(part: Part) -> Settings:
    """What a block's modules hold besides tensors that may decide what they cost."""
    return {
        (local, name): value
        for local, module in part.module.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, str, tuple)) and name != "training" and not name.startswith("_")
    }


def looks(structures: Sequence[object], settings: Sequence[Settings]) -> list[object]:
    """One value per block of embed, blocks and head: blocks with equal ones cost the same. A setting that is
    each block's own number does not count."""
    counted = list(enumerate(settings))[1:-1]
    names = {key for _, held in counted for key in held}
    numbers = {
        key
        for key in names
        if all(type(held.get(key)) is int and held[key] == block - 1 for block, held in counted)
    }
    return [
        (structure, repr([(key, value) for key, value in held.items() if key not in numbers]))
        for structure, held in zip(structures, settings, strict=True)
    ]


def _chain(
    bodies: ModuleBodies, weights: Sequence[Mapping[str, Tensor]], samples: Samples, draw: Draw | None
) -> tuple[list[tuple[int, ...] | None], tuple[str, ...]]:
    """(shape of a row of each block's input, what an evaluation reports) of the first sample."""
    batch = bodies.batch(samples.micro_batch(samples.numbers(0, 1)))
    x: Tensor | None = None
    shapes: list[tuple[int, ...] | None] = [None]
    for block, named in enumerate(weights[:-1]):
        x = bodies.forward(block, named, x, batch, draw)
        shapes.append(tuple(x.shape[1:]))
    assert x is not None
    return shapes, tuple(bodies.evaluate(weights[-1], x, batch).metrics())


def _looked_at(samples: Samples) -> tuple[float, int]:
    """(targets on average, most bytes) of some samples."""
    count = min(len(samples), LOOKED_AT)
    found = [samples.micro_batch((number,)) for number in range(count)]
    sizes = [
        sum(value.nbytes for value in tree_leaves(batch.data) if hasattr(value, "nbytes")) for batch in found
    ]
    return sum(batch.targets for batch in found) / count, max(sizes)


def _check_room(ram_bytes: int) -> None:
    """Raise DoesNotFit where what is held already leaves nothing to run a block in."""
    held = process_memory().resident
    if held + LEAST_BYTES > ram_bytes:
        raise DoesNotFit(
            f"Python, torch, the data set and the modules' buffers take {format_bytes(held)}; the budget "
            f"leaves {format_bytes(max(0, ram_bytes))} for them and everything else.",
            "raise --ram; data that is read when it is asked for takes less than data that is held",
        )


def refuse_unlike(
    names: Sequence[str], shapes: Sequence[tuple[int, ...] | None], seen: Sequence[tuple[int, ...] | None]
) -> None:
    """Raise ConfigError where what lies between blocks depends on which data set a sample is of."""
    for name, trained, judged in zip(names, shapes[1:], seen[1:], strict=False):
        if trained != judged:
            raise ConfigError(
                f"`{name}` gave {judged} for a sample that is evaluated on, and {trained} for one that is "
                "trained on.",
                "give one size per sample, the same for all: pad or cut what is longer",
            )


def _refuse_changed(before: Mapping[str, int], after: Mapping[str, Tensor]) -> None:
    for name, version in before.items():
        if name not in after or after[name]._version != version:
            raise ConfigError(
                f"The buffer `{name}` is changed by forward, which runs twice in a step, and once more "
                "after a crash.",
                "compute what depends on the batch from the batch; keep constants in buffers",
            )


def _costs(
    bodies: ModuleBodies, kinds: list[_Kind], samples: Samples, sizes: list[int], sender: Sender
) -> tuple[tuple[Cost, ...], ...]:
    """By kind, each size that memory allows."""
    found: list[list[Cost]] = [[] for _ in kinds]
    for number, rows in enumerate(sizes):
        try:
            measured = [_cost(bodies, kind, samples, rows) for kind in kinds]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) and PRIMITIVE not in str(error):
                raise
            if number == 0:
                raise DoesNotFit(
                    f"One block alone, at a micro-batch of {rows}, needs more than the "
                    f"{format_bytes(process_memory().resident)} that measuring it took before it failed.",
                    "raise --ram, or lower --micro-batch-size",
                ) from None
            break
        for costs, cost in zip(found, measured, strict=True):
            costs.append(_steadied(cost, costs[-1]) if costs else cost)
        sender.send("progress", phase="measure the model", done=number + 1, total=len(sizes))
    return tuple(tuple(costs) for costs in found)


def _steadied(cost: Cost, smaller: Cost) -> Cost:
    """Less what other programs took."""
    more = DEARER * cost.rows / smaller.rows
    return cost.model_copy(
        update={
            "forward_seconds": min(cost.forward_seconds, more * smaller.forward_seconds),
            "backward_seconds": min(cost.backward_seconds, more * smaller.backward_seconds),
        }
    )


def _cost(bodies: ModuleBodies, kind: _Kind, samples: Samples, rows: int) -> Cost:
    """One kind of block at one size of micro-batch."""
    block, weights, shape = kind
    draw = Draw(0, 0)
    batch = bodies.batch(samples.micro_batch([number % len(samples) for number in range(rows)]))
    grads = {
        name: torch.zeros(value.shape, dtype=TORCH_DTYPES[bodies.types.gradient])
        for name, value in weights.items()
    }
    x = None
    if shape is not None:
        x = torch.randn((rows, *shape), dtype=torch.float32).to(TORCH_DTYPES[bodies.types.compute])
    if block == len(bodies.model.parts) - 1:
        assert x is not None
        inside = x

        def forward() -> None:
            bodies.evaluate(weights, inside, batch)

        def backward() -> None:
            bodies.loss(weights, inside, batch, draw, 1.0, grads, False)
    else:
        dy = torch.randn_like(bodies.forward(block, weights, x, batch, draw))

        def forward() -> None:
            bodies.forward(block, weights, x, batch, draw)

        def backward() -> None:
            bodies.backward(block, weights, x, batch, draw, dy, grads, False)

    forward_bytes, forward_seconds = _measure(forward)
    backward_bytes, backward_seconds = _measure(backward)
    return Cost(
        rows=rows,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    )


def _measure(body: Callable[[], None]) -> tuple[int, float]:
    """(most bytes above what is held now, seconds) of a call."""
    body()
    trim_malloc()
    with suppress(OSError):  # else the peak so far counts, which is no less
        Path("/proc/self/clear_refs").write_text("5")
    before = process_memory().resident
    body()
    most, best, spent = process_memory().peak - before, float("inf"), 0.0
    for _ in range(RUNS):
        if spent > MEASURE_SECONDS:
            break
        began = time.perf_counter()
        body()
        best = min(best, time.perf_counter() - began)
        spent += time.perf_counter() - began
    return most + SPARE_BYTES, best
