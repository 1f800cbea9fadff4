"""The table of second halves of a layer, by what the layer's shape says about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from packmule.models import mlp
from packmule.models.context import Decoder, Tensors
from packmule.shapes.mlp import Mlp

if TYPE_CHECKING:
    from packmule.shapes.layer import LayerShape


class Forward(Protocol):
    """out = x + f(norm2 x).

    Args:
        x: c [N, H]; out: c [N, H], may be x unless a backward will need x.
        saved: the half's saved tensors and those of "norm2", of at least N rows, written.
        scratch: "normed" [N, H] and the half's own.
    """

    def __call__(
        self,
        decoder: Decoder,
        layer: LayerShape,
        weights: Tensors,
        x: Tensor,
        saved: Tensors,
        scratch: Tensors,
        out: Tensor,
    ) -> None: ...


class Backward(Protocol):
    """Gradients of `Forward`; saved tensors may be overwritten: a backward runs once.

    Args:
        saved: as the forward left it; with `recompute`, any buffer of that layout: as much of the
            forward as is needed runs into it again, with the same bits.
        dy, dx: c [N, H], gradients of out (read) and x (written). dx may be dy; it may not be x.
        first: write parameters' gradients, do not add.
    """

    def __call__(
        self,
        decoder: Decoder,
        layer: LayerShape,
        weights: Tensors,
        x: Tensor,
        saved: Tensors,
        scratch: Tensors,
        dy: Tensor,
        dx: Tensor,
        grads: Tensors,
        first: bool,
        recompute: bool,
    ) -> None: ...


class Half(NamedTuple):
    """The bodies of one kind of second half."""

    forward: Forward
    backward: Backward


HALVES: dict[type, Half] = {Mlp: Half(mlp.forward, mlp.backward)}


def half_of(layer: LayerShape) -> Half:
    """The bodies of a layer's second half."""
    return HALVES[type(layer.feed_forward)]
