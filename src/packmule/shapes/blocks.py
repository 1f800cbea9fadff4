"""Parameters, and the blocks they are grouped into: the units of streaming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from packmule.shapes.layout import PAGE, Layout, TensorSpec, layout

BlockKind = Literal["embed", "layer", "experts", "logits", "head"]
Role = Literal["embedding", "norm", "bias", "matrix"]


class Parameter(NamedTuple):
    """One trainable tensor.

    Attributes:
        name: local to its block ("q.weight").
        role: what it is; decides its weight decay and how it is drawn at random.
        start: of a model drawn at random: the value of a norm or bias, and for other roles what
            multiplies the model's standard deviation.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    start: float = 1.0


@dataclass(frozen=True)
class Block:
    """One unit of streaming.

    Attributes:
        index: position in the model: embed first, head last. A layer is one block; one with experts
            is several: its attention and router, then groups of its experts. Where the vocabulary is
            cut, embed is several, and so is the head: parts of its matrix ("logits"), then its norm.
        kind: which task bodies it runs.
        parameters: the tensors this block owns.
        shared: index of the block whose `weight` this head reads as its own (tied), or None.
        layer: which layer (from 0) it is or belongs to; -1 for embed and head.
        experts: those of a group.
        family: model_type of the model it belongs to; its Hugging Face names follow from it.
        tokens: where the vocabulary is cut, the ids whose rows its `weight` holds.
        origin: where the vocabulary is cut, the block that it is, or is a part of, where it is not.
    """

    index: int
    name: str
    kind: BlockKind
    parameters: tuple[Parameter, ...]
    shared: int | None = None
    layer: int = -1
    experts: range = range(0)
    family: str = "llama"
    tokens: range = range(0)
    origin: Block | None = None

    @property
    def whole(self) -> Block:
        """This block as it is where the vocabulary is not cut."""
        return self.origin or self

    def first_row(self, name: str) -> int:
        """Where a parameter's rows begin in that of the whole block."""
        return self.tokens.start if name == "weight" else 0

    def specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """The owned parameters as tensors of one dtype."""
        return tuple(TensorSpec(p.name, p.shape, dtype) for p in self.parameters)

    def layout(self, dtype: str) -> Layout:
        """How the owned parameters lie in a weight, gradient or plane buffer (pages)."""
        return layout(self.specs(dtype), PAGE)

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs("float32"))
