"""What compute tasks take, by kind: where decoders and users' own modules meet.

The builder and the bounds ask for a task's saved tensors, scratch, workspace and seconds. A decoder
answers from its shapes and the machine's rates, a user's modules from what the gauge measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import lru_cache

from packmule.graph.costs import Costs
from packmule.graph.kinds import TaskKind
from packmule.shapes import bodies
from packmule.shapes.bodies import Dtypes
from packmule.shapes.experts import Experts
from packmule.shapes.layout import ITEMSIZE, TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape, Shape

FORWARD = (TaskKind.LAYER_FORWARD, TaskKind.ROUTE_FORWARD)
BACKWARD = (TaskKind.LAYER_BACKWARD, TaskKind.ROUTE_BACKWARD)
"""Of a layer; of one with experts, its first block."""

EMBED = (TaskKind.EMBED_FORWARD, TaskKind.EMBED_BACKWARD, TaskKind.EMBED_DECODE)

PART = (TaskKind.PART_SCORE, TaskKind.PART_GRADIENT)
"""Of the head, where the vocabulary is cut."""

INDEX_BYTES = 32
"""Of a token, while those of a part of the embedding are picked out: their places and rows."""

HEAD_WORKSPACE = 8 << 20
"""Bytes torch may hold outside the arena during a decoder's head: packing of its matrices."""


class Works(ABC):
    """One model's compute tasks. Blocks are numbered as in `Shape.blocks()`.

    `tokens` are those of a micro-batch: of a text, or samples of a user's data set.
    """

    @property
    @abstractmethod
    def embed_backward_reads_weights(self) -> bool:
        """Whether the embedding's weights are fetched for its backward."""

    @abstractmethod
    def experts(self, block: int) -> Experts | None:
        """The experts of a block's layer, if it has any."""

    @abstractmethod
    def saved(self, block: int, tokens: int) -> int:
        """Bytes that a layer's backward needs from its forward, besides the block input."""

    @abstractmethod
    def scratch(self, kind: TaskKind, block: int, tokens: int) -> int:
        """Bytes of a task's declared temporaries."""

    @abstractmethod
    def workspace(self, kind: TaskKind, block: int, tokens: int) -> int:
        """Most bytes that torch holds during a task outside the arena."""

    @abstractmethod
    def seconds(
        self,
        kind: TaskKind,
        block: int,
        tokens: int,
        costs: Costs,
        mean_length: float,
        recompute: bool = True,
        frozen: bool = False,
    ) -> float:
        """How long a task takes.

        Args:
            mean_length: tokens per document, weighted by tokens; for attention's FLOPs.
            recompute: a backward runs forward again.
            frozen: it gives the gradient of the input alone.
        """


def works_of(shape: Shape, types: Dtypes, loss_chunk: int, plane_bytes: tuple[int, ...]) -> Works:
    """The tasks of a model.

    Args:
        loss_chunk: tokens whose logits exist at once.
        plane_bytes: of each block.
    """
    if isinstance(shape, ModuleShape):
        return ModuleWorks(shape)
    return DecoderWorks(shape, types, loss_chunk, plane_bytes)


class DecoderWorks(Works):
    """A decoder of packmule.models, from formulas."""

    def __init__(
        self, shape: ModelShape, types: Dtypes, loss_chunk: int, plane_bytes: tuple[int, ...]
    ) -> None:
        self._shape, self._types, self._loss_chunk, self._planes = shape, types, loss_chunk, plane_bytes

    @property
    def embed_backward_reads_weights(self) -> bool:
        return False

    def experts(self, block: int) -> Experts | None:
        return self._shape.layer(block).experts

    def saved(self, block: int, tokens: int) -> int:
        return _bytes(bodies.layer_saved, self._shape.layer(block), tokens, self._types)

    def scratch(self, kind: TaskKind, block: int, tokens: int) -> int:
        shape, types = self._shape, self._types
        if kind in FORWARD:
            return _bytes(bodies.layer_forward_scratch, shape.layer(block), tokens, types)
        if kind in BACKWARD:
            return _bytes(bodies.layer_backward_scratch, shape.layer(block), tokens, types)
        if kind in (TaskKind.HEAD_LOSS, TaskKind.HEAD_EVALUATE):
            return _bytes(bodies.head_scratch, shape, self._chunk(tokens), types, kind == TaskKind.HEAD_LOSS)
        if kind in PART:
            rows, gradient = self._rows(block), kind == TaskKind.PART_GRADIENT
            return _bytes(bodies.part_scratch, shape, rows, self._chunk(tokens), types, gradient)
        if kind == TaskKind.HEAD_CLOSE:
            return _bytes(bodies.close_scratch, shape, self._chunk(tokens), types)
        if kind in EMBED and shape.vocabulary_parts > 1:
            return _bytes(bodies.embed_part_scratch, shape, tokens, types)
        return 0

    def _rows(self, block: int) -> int:
        """Of a part of the vocabulary."""
        return len(self._shape.blocks()[block].tokens)

    def workspace(self, kind: TaskKind, block: int, tokens: int) -> int:
        if kind in (*FORWARD, *BACKWARD):
            return bodies.layer_workspace(self._shape.layer(block), tokens, self._types)
        if kind in EMBED and self._shape.vocabulary_parts > 1:
            return INDEX_BYTES * tokens
        heads = (TaskKind.HEAD_LOSS, TaskKind.HEAD_EVALUATE, *PART, TaskKind.HEAD_CLOSE)
        return HEAD_WORKSPACE if kind in heads else 0

    def seconds(
        self,
        kind: TaskKind,
        block: int,
        tokens: int,
        costs: Costs,
        mean_length: float,
        recompute: bool = True,
        frozen: bool = False,
    ) -> float:
        stream = self._shape.stream_bytes(tokens, self._types)
        parts = self._shape.vocabulary_parts
        if kind in EMBED:
            passes = 4 if kind == TaskKind.EMBED_BACKWARD else 2
            return costs.compute(moved=passes * stream / parts)
        if kind in PART:
            rows, item = self._rows(block), ITEMSIZE[self._types.compute]
            matmul = bodies.head_flops(self._shape, tokens, rows)
            if kind == TaskKind.PART_SCORE:
                return costs.compute(matmul, moved=2.0 * tokens * rows * item)
            moved = 4.0 * tokens * rows * item + 4.0 * stream
            moved += 3.0 * (tokens / self._chunk(tokens)) * self._planes[block]
            return costs.compute(3 * matmul, moved=moved)
        if kind in (TaskKind.HEAD_CLOSE, TaskKind.HEAD_TALLY):
            return costs.compute(moved=8 * stream)
        if kind == TaskKind.HEAD_EVALUATE:
            return costs.compute(bodies.head_flops(self._shape, tokens))
        if kind == TaskKind.HEAD_LOSS:
            moved = 3.0 * tokens * self._shape.vocab * ITEMSIZE[self._types.compute]
            owners = (block, 0) if self._shape.tied else (block,)
            planes = sum(self._planes[owner] for owner in owners)
            moved += 0.0 if frozen else 3.0 * (tokens / self._chunk(tokens)) * planes
            return costs.compute((2 if frozen else 3) * bodies.head_flops(self._shape, tokens), moved=moved)
        layer = self._shape.layer(block)
        matmul, attention = bodies.layer_flops(layer, tokens, mean_length)
        factor, score = 1.0, 1.0
        if kind in BACKWARD:
            factor, score = (3.0, 3.5) if recompute else (2.0, 2.5)
            factor -= 1.0 if frozen else 0.0
        moved = bodies.layer_moved(layer, tokens, self._types) * factor
        return costs.compute(matmul * factor, attention * score, moved)

    def _chunk(self, tokens: int) -> int:
        return min(self._loss_chunk, tokens)


class ModuleWorks(Works):
    """A user's modules, as measured. Nothing is saved: every backward runs forward again."""

    def __init__(self, shape: ModuleShape) -> None:
        self._shape = shape

    @property
    def embed_backward_reads_weights(self) -> bool:
        return True

    def experts(self, block: int) -> Experts | None:
        return None

    def saved(self, block: int, tokens: int) -> int:
        return 0

    def scratch(self, kind: TaskKind, block: int, tokens: int) -> int:
        return 0

    def workspace(self, kind: TaskKind, block: int, tokens: int) -> int:
        cost = self._shape.cost(block, tokens)
        return cost.backward_bytes if _is_backward(kind) else cost.forward_bytes

    def seconds(
        self,
        kind: TaskKind,
        block: int,
        tokens: int,
        costs: Costs,
        mean_length: float,
        recompute: bool = True,
        frozen: bool = False,
    ) -> float:
        cost = self._shape.cost(block, tokens)
        measured = cost.backward_seconds if _is_backward(kind) else cost.forward_seconds
        return measured * tokens / cost.rows + costs.task_seconds


def _is_backward(kind: TaskKind) -> bool:
    return kind in (TaskKind.LAYER_BACKWARD, TaskKind.EMBED_BACKWARD, TaskKind.HEAD_LOSS)


@lru_cache(maxsize=4096)
def _bytes(make: Callable[..., tuple[TensorSpec, ...]], *arguments: Hashable) -> int:
    """Bytes of a list of tensors; candidates ask for the same few again and again."""
    return layout(make(*arguments)).bytes
