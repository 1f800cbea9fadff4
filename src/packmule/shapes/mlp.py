"""The feed-forward half of a layer as numbers: parameters, saved and scratch tensors, FLOPs.

Another half (`FeedForward`) can take its place layer by layer; its bodies are in packmule.models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from packmule.shapes.blocks import Parameter
from packmule.shapes.layout import TensorSpec

if TYPE_CHECKING:
    from packmule.shapes.bodies import Dtypes

Activation = Literal["silu", "gelu_tanh"]


class FeedForward(Protocol):
    """What the second half of a layer declares about itself. H is `hidden`, N `tokens`."""

    def parameters(self, hidden: int, start: float) -> tuple[Parameter, ...]:
        """The half's own parameters, without its norms. `start`: `Parameter.start` of the matrices
        whose product is added to the residual stream."""

    def saved(self, hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
        """What its backward needs from its forward, besides its input."""

    def scratch(self, hidden: int, tokens: int, types: Dtypes, backward: bool) -> tuple[TensorSpec, ...]:
        """Its temporaries. A name that the attention half uses too is one tensor, as large as the
        larger of the two, and flat where they differ in shape."""

    def flops(self, hidden: int, tokens: int) -> float:
        """FLOPs of its forward's matrix products."""

    def moved(self, tokens: int) -> int:
        """Elements of activations that its forward reads and writes."""


@dataclass(frozen=True)
class Mlp:
    """down(activation(gate x) * up x) (Shazeer 2020, arXiv:2002.05202).

    Attributes:
        width: F.
    """

    width: int
    activation: Activation = "silu"

    def parameters(self, hidden: int, start: float) -> tuple[Parameter, ...]:
        """gate, up, down."""
        return (
            Parameter("gate.weight", (self.width, hidden), "matrix"),
            Parameter("up.weight", (self.width, hidden), "matrix"),
            Parameter("down.weight", (hidden, self.width), "matrix", start),
        )

    def saved(self, hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
        """The two products that the activation joins."""
        return (
            TensorSpec("gate", (tokens, self.width), types.compute),
            TensorSpec("up", (tokens, self.width), types.compute),
        )

    def scratch(self, hidden: int, tokens: int, types: Dtypes, backward: bool) -> tuple[TensorSpec, ...]:
        """What they are joined to."""
        return (TensorSpec("act", (tokens * self.width,), types.compute),)

    def flops(self, hidden: int, tokens: int) -> float:
        """Three products."""
        return 2.0 * tokens * 3 * hidden * self.width

    def moved(self, tokens: int) -> int:
        """gate, up and what they are joined to, each written and read."""
        return 6 * self.width * tokens
