"""Where a task's tensors are: views of its memory by buffer kind and block."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from packmule.engine.program import Range, Task
from packmule.engine.runtime import Runtime, Specs
from packmule.graph.kinds import SECOND, BufferKind
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.layout import ITEMSIZE


def tensor(runtime: Runtime, place: Range, count: int, dtype: str, skip: int = 0) -> Tensor:
    """`count` elements of a buffer, flat.

    Args:
        skip: bytes of the buffer before them.
    """
    begin, size = place.offset + skip, count * ITEMSIZE[dtype]
    return runtime.memory[place.tier][begin : begin + size].view(TORCH_DTYPES[dtype])


def weights(runtime: Runtime, task: Task, block: int) -> dict[str, Tensor]:
    """A block's parameters in the compute dtype."""
    found = task.find(BufferKind.WEIGHTS, block)
    if found is not None:
        return runtime.views(found, runtime.weight_layouts[block])
    # The master plane comes first in a resident state.
    return runtime.views(task.get(BufferKind.STATE, block), runtime.plane_layouts[block])


def gradients(runtime: Runtime, task: Task, block: int) -> dict[str, Tensor]:
    """A block's gradients; empty where the task has none to write: the block is frozen in this step."""
    found = task.find(BufferKind.GRADIENT, block)
    return {} if found is None else runtime.views(found, runtime.plane_layouts[block])


def scratch(
    runtime: Runtime, task: Task, kind: BufferKind, make: Specs, *rest: Hashable
) -> dict[str, Tensor]:
    """The tensors of `make(*rest)` in the task's buffer of a kind."""
    return runtime.views(task.get(kind), runtime.layout(make, *rest))


def stream(runtime: Runtime, place: Range) -> Tensor:
    """The residual stream in a buffer: c [tokens, H]."""
    hidden, dtype = runtime.model.decoder.hidden, runtime.model.types.compute
    rows = place.bytes // (hidden * ITEMSIZE[dtype])
    return tensor(runtime, place, rows * hidden, dtype).view(rows, hidden)


def input_of(runtime: Runtime, task: Task, block: int) -> Tensor:
    """The input of a block: c [tokens, H]."""
    return stream(runtime, task.get(BufferKind.INPUT, block))


def head_input(runtime: Runtime, task: Task) -> Tensor:
    """The input of the head: c [tokens, H]."""
    return input_of(runtime, task, len(runtime.model.blocks) - 1)


def tokens(runtime: Runtime, task: Task) -> int:
    """Most tokens of the task's micro-batch."""
    return runtime.state.capacities[task.micro]


@contextmanager
def noise(runtime: Runtime, task: Task, grads: Mapping[str, Tensor]) -> Iterator[None]:
    """Add the squared norm of what a micro-batch adds to the gradients of the block's norm weights
    to its sum, for the gradient noise scale (packmule.optim.noise). A step of one micro-batch has
    no noise to see, a second backward none that is new, and a frozen block none at all."""
    state = runtime.state
    if len(state.batches) < 2 or task.part == SECOND or not grads:
        yield
        return
    names = [p.name for p in runtime.model.blocks[task.block].parameters if p.role == "norm"]
    before = {} if task.micro == 0 else {name: grads[name].clone() for name in names}
    yield
    for name in names:
        added = grads[name] - before[name] if before else grads[name]
        state.noise[task.micro] = state.noise.get(task.micro, 0.0) + runtime.near_kernels.sum_squares(added)
