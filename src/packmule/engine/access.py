"""Where a task's tensors are: views of the arena by buffer kind and block."""

from __future__ import annotations

from torch import Tensor

from packmule.engine.program import Task
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import BufferKind
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.layout import ITEMSIZE


def tensor(runtime: Runtime, offset: int, count: int, dtype: str) -> Tensor:
    """`count` elements from an arena offset on, flat."""
    size = count * ITEMSIZE[dtype]
    return runtime.bytes[offset : offset + size].view(TORCH_DTYPES[dtype])


def weights(runtime: Runtime, task: Task, block: int) -> dict[str, Tensor]:
    """A block's parameters in the compute dtype."""
    found = task.find(BufferKind.WEIGHTS, block)
    if found is not None:
        return runtime.views(found.offset, runtime.weight_layouts[block])
    # The master plane comes first in a resident state.
    return runtime.views(task.get(BufferKind.STATE, block).offset, runtime.plane_layouts[block])


def gradients(runtime: Runtime, task: Task, block: int) -> dict[str, Tensor]:
    """A block's gradients."""
    return runtime.views(task.get(BufferKind.GRADIENT, block).offset, runtime.plane_layouts[block])
