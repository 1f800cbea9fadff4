"""The feed-forward half of a layer as numbers: parameters, saved and scratch tensors, FLOPs.

Another half (`FeedForward`) can take its place layer by layer; its bodies are in packmule.models.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
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


def linear_parameters(
    name: str, outputs: int, inputs: int, bias: bool, start: float = 1.0
) -> tuple[Parameter, ...]:
    """Weight and bias of one matrix product."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), "matrix", start)
    return (weight, Parameter(f"{name}.bias", (outputs,), "bias", 0.0)) if bias else (weight,)


@dataclass(frozen=True)
class Mlp:
    """down(f(gate x) * up x) (Shazeer 2020, arXiv:2002.05202), or without a gate down(f(up x)).

    Attributes:
        width: F.
        activation: f.
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def inner(self) -> tuple[str, ...]:
        """Names of the products of width F; f is of the first."""
        return ("gate", "up") if self.gated else ("up",)

    def parameters(self, hidden: int, start: float) -> tuple[Parameter, ...]:
        """gate, up, down."""
        inner = (linear_parameters(name, self.width, hidden, self.bias) for name in self.inner)
        return (*chain(*inner), *linear_parameters("down", hidden, self.width, self.bias, start))

    def saved(self, hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
        """The products that the activation joins."""
        return tuple(TensorSpec(name, (tokens, self.width), types.compute) for name in self.inner)

    def scratch(self, hidden: int, tokens: int, types: Dtypes, backward: bool) -> tuple[TensorSpec, ...]:
        """What they are joined to."""
        return (TensorSpec("act", (tokens * self.width,), types.compute),)

    def flops(self, hidden: int, tokens: int) -> float:
        """Two or three products."""
        return 2.0 * tokens * (len(self.inner) + 1) * hidden * self.width

    def moved(self, tokens: int) -> int:
        """The products and what they are joined to, each written and read."""
        return 2 * (len(self.inner) + 1) * self.width * tokens
