"""The compute tasks of a user's own modules: buffers in, `models.modules` runs them, buffers out."""

from __future__ import annotations

import math

from torch import Tensor

from packmule.engine.access import gradients, tensor, weights
from packmule.engine.program import Task
from packmule.engine.runtime import Runtime
from packmule.errors import ConfigError
from packmule.graph.kinds import BufferKind, TaskKind
from packmule.models.modules.samples import Draw, SampleBatch
from packmule.shapes.module import ModuleShape


def _batch(runtime: Runtime, task: Task) -> SampleBatch:
    batch: SampleBatch = runtime.state.batches[task.micro]
    return batch


def _draw(runtime: Runtime, task: Task) -> Draw | None:
    """Of a step; none where the model is evaluated."""
    step = runtime.state.number
    return None if step is None else Draw(step, task.micro)


def _training_draw(runtime: Runtime, task: Task) -> Draw:
    draw = _draw(runtime, task)
    if draw is None:
        raise RuntimeError("a backward without a step")
    return draw


def _place(runtime: Runtime, task: Task, kind: BufferKind, block: int, output_of: int) -> Tensor:
    """A buffer as the output (or its gradient) of block `output_of`: c [rows, ...]."""
    shape = runtime.model.shape
    assert isinstance(shape, ModuleShape)
    sizes = (_batch(runtime, task).rows, *shape.parts[output_of].row_shape)
    place = task.get(kind, block)
    return tensor(runtime, place, math.prod(sizes), runtime.model.types.compute).view(sizes)


def _input(runtime: Runtime, task: Task, block: int) -> Tensor | None:
    return None if block == 0 else _place(runtime, task, BufferKind.INPUT, block, block - 1)


def _head_input(runtime: Runtime, task: Task) -> Tensor:
    return _place(runtime, task, BufferKind.INPUT, task.block, task.block - 1)


def forward(runtime: Runtime, task: Task) -> None:
    """Embed, or a layer: the block's input becomes the next one's."""
    block = task.block
    x, batch = _input(runtime, task, block), _batch(runtime, task)
    out = runtime.modules.forward(block, weights(runtime, task, block), x, batch, _draw(runtime, task))
    target = _place(runtime, task, BufferKind.INPUT, block + 1, block)
    if out.shape != target.shape:
        raise ConfigError(
            f"`{runtime.model.blocks[block].name}` gave {tuple(out.shape)}; it was measured to give "
            f"{tuple(target.shape)}.",
            "give one size per sample, the same for all: pad or cut what is longer",
        )
    target.copy_(out)


def backward(runtime: Runtime, task: Task) -> None:
    """Embed, or a layer: the gradient of its output becomes that of its input."""
    block = task.block
    dy = _place(runtime, task, BufferKind.DY, -1, block)
    x, batch = _input(runtime, task, block), _batch(runtime, task)
    grads, first = gradients(runtime, task, block), task.micro == 0
    dx = runtime.modules.backward(
        block, weights(runtime, task, block), x, batch, _training_draw(runtime, task), dy, grads, first
    )
    if block:
        _store(_place(runtime, task, BufferKind.DY, -1, block - 1), dx)


def head_loss(runtime: Runtime, task: Task) -> None:
    """Losses, and the gradient of the head's input."""
    block, state = task.block, runtime.state
    total, count, dx = runtime.modules.loss(
        weights(runtime, task, block),
        _head_input(runtime, task),
        _batch(runtime, task),
        _training_draw(runtime, task),
        state.scale,
        gradients(runtime, task, block),
        task.micro == 0,
    )
    state.losses[task.micro] = (total, count)
    _store(_place(runtime, task, BufferKind.DY, -1, block - 1), dx)


def head_evaluate(runtime: Runtime, task: Task) -> None:
    """Losses, and what else the head reports."""
    runtime.state.tallies[task.micro] = runtime.modules.evaluate(
        weights(runtime, task, task.block), _head_input(runtime, task), _batch(runtime, task)
    )


def _store(target: Tensor, found: Tensor | None) -> None:
    """A gradient to its buffer; zeros where nothing depends on x."""
    if found is None:
        target.zero_()
    else:
        target.copy_(found)


MODULE_BODIES = {
    TaskKind.EMBED_FORWARD: forward,
    TaskKind.LAYER_FORWARD: forward,
    TaskKind.HEAD_LOSS: head_loss,
    TaskKind.HEAD_EVALUATE: head_evaluate,
    TaskKind.LAYER_BACKWARD: backward,
    TaskKind.EMBED_BACKWARD: backward,
}
