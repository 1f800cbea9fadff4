"""Task bodies of embedding and head where the vocabulary is cut into parts."""

from __future__ import annotations

from torch import Tensor

from packmule.engine import access
from packmule.engine.program import Task
from packmule.engine.runtime import Runtime
from packmule.graph.kinds import BufferKind
from packmule.models import vocabulary
from packmule.models.context import Tensors, TokenBatch
from packmule.shapes import bodies as shapes
from packmule.shapes import vocabulary as shapes_of


def part_weights(runtime: Runtime, task: Task) -> dict[str, Tensor]:
    """The final norm's, and "weight" of the task's part."""
    norm = access.weights(runtime, task, len(runtime.model.blocks) - 1)
    return {**norm, "weight": access.weights(runtime, task, task.block)["weight"]}


def embed_forward(runtime: Runtime, task: Task, weights: Tensors, batch: TokenBatch, out: Tensor) -> None:
    """The tokens of one part, of a micro-batch or of a text that is generated."""
    ids = runtime.model.blocks[task.block].tokens
    vocabulary.embed_forward(runtime.decoder, weights, ids, batch, out, _embed_scratch(runtime, task))


def embed_backward(runtime: Runtime, task: Task) -> None:
    vocabulary.embed_backward(
        runtime.decoder,
        access.stream(runtime, task.get(BufferKind.DY, -1)),
        runtime.model.blocks[task.block].tokens,
        runtime.state.batches[task.micro],
        access.gradients(runtime, task, task.block),
        _embed_scratch(runtime, task),
        first=task.micro == 0,
    )


def part_score(runtime: Runtime, task: Task) -> None:
    model = runtime.model
    vocabulary.part_score(
        runtime.decoder,
        part_weights(runtime, task),
        model.blocks[task.block].tokens,
        runtime.state.batches[task.micro],
        access.head_input(runtime, task),
        _chunk(runtime, task),
        _scores(runtime, task),
        _part_scratch(runtime, task, gradient=False),
        opening=task.block == model.head_parts[0],
    )


def part_gradient(runtime: Runtime, task: Task) -> None:
    model = runtime.model
    vocabulary.part_gradient(
        runtime.decoder,
        part_weights(runtime, task),
        model.blocks[task.block].tokens,
        runtime.state.batches[task.micro],
        access.head_input(runtime, task),
        runtime.state.scale,
        _chunk(runtime, task),
        _scores(runtime, task),
        _gathered(runtime, task),
        access.gradients(runtime, task, task.block)["weight"],
        _part_scratch(runtime, task, gradient=True),
        first=task.micro == 0,
        opening=task.block == model.head_parts[-1],
    )


def head_close(runtime: Runtime, task: Task) -> None:
    grads, shape, types = (
        access.gradients(runtime, task, task.block),
        runtime.model.decoder,
        runtime.model.types,
    )
    chunk = _chunk(runtime, task)
    with access.noise(runtime, task, grads):
        runtime.state.losses[task.micro] = vocabulary.head_close(
            runtime.decoder,
            access.weights(runtime, task, task.block),
            runtime.state.batches[task.micro],
            access.head_input(runtime, task),
            chunk,
            _scores(runtime, task),
            _gathered(runtime, task),
            access.stream(runtime, task.get(BufferKind.DY, -1)),
            grads,
            access.scratch(runtime, task, BufferKind.SCRATCH, shapes.close_scratch, shape, chunk, types),
            first=task.micro == 0,
        )


def head_tally(runtime: Runtime, task: Task) -> None:
    state = runtime.state
    batch = state.batches[task.micro]
    scores = _scores(runtime, task)
    state.tallies[task.micro] = vocabulary.tally(batch, scores, _chunk(runtime, task), state.token_bytes)


def _chunk(runtime: Runtime, task: Task) -> int:
    return min(runtime.model.plan.numerics.loss_chunk, access.tokens(runtime, task))


def _scores(runtime: Runtime, task: Task) -> dict[str, Tensor]:
    layout = runtime.layout(shapes_of.scores, access.tokens(runtime, task), runtime.model.types)
    return runtime.views(task.get(BufferKind.SCORES, -1), layout)


def _gathered(runtime: Runtime, task: Task) -> Tensor:
    hidden, types, tokens = runtime.model.decoder.hidden, runtime.model.types, access.tokens(runtime, task)
    layout = runtime.layout(shapes_of.gathered, hidden, tokens, types)
    return runtime.views(task.get(BufferKind.GATHERED, -1), layout)["dnormed"]


def _part_scratch(runtime: Runtime, task: Task, gradient: bool) -> dict[str, Tensor]:
    model, rows = runtime.model, len(runtime.model.blocks[task.block].tokens)
    arguments = (model.decoder, rows, _chunk(runtime, task), model.types, gradient)
    return access.scratch(runtime, task, BufferKind.SCRATCH, shapes.part_scratch, *arguments)


def _embed_scratch(runtime: Runtime, task: Task) -> dict[str, Tensor]:
    arguments = (runtime.model.decoder, access.tokens(runtime, task), runtime.model.types)
    return access.scratch(runtime, task, BufferKind.SCRATCH, shapes.embed_part_scratch, *arguments)
