"""A layer's mixture of experts as numbers: its groups, and what its bodies keep and borrow.

Letters as in docs/design.md, and E experts, k experts of a token, F their feed-forward width. A pair
is one of the N * k (token, expert) that a layer routes, sorted by expert. A token's k experts differ,
so one expert has at most N pairs and all of them have N * k: no capacity is chosen, and no token is
dropped.

A layer with experts is several blocks. The first holds attention, norms and router; the others a
group of experts each, so that what must be in RAM at once does not grow with the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packmule.shapes.blocks import Parameter
from packmule.shapes.layout import TensorSpec
from packmule.shapes.mlp import Activation

if TYPE_CHECKING:
    from packmule.shapes.bodies import Dtypes

GROUP_NUMEL = 64 << 20
"""Most parameters of a group of experts, unless one expert has more."""

MOST_EXPERTS = 1024
"""Experts that the kernels take."""


@dataclass(frozen=True)
class Experts:
    """A feed-forward half that sends each token to some of its experts (Shazeer et al. 2017,
    arXiv:1701.06538). It is a `FeedForward` whose own parameters are the router's.

    Attributes:
        count: E.
        chosen: k.
        width: F of one expert.
        renormalize: the shares of a token's experts are divided by their sum.
        balance: factor of the load-balancing loss; 0 for none.
        groups: blocks that the experts are cut into.
    """

    count: int
    chosen: int
    width: int
    renormalize: bool
    balance: float
    groups: int
    activation: Activation = "silu"

    def ranges(self) -> tuple[range, ...]:
        """The experts of each group, as equal as can be."""
        small, more = divmod(self.count, self.groups)
        found, start = [], 0
        for group in range(self.groups):
            stop = start + small + (group < more)
            found.append(range(start, stop))
            start = stop
        return tuple(found)

    def parameters(self, hidden: int, start: float) -> tuple[Parameter, ...]:
        """The router."""
        return (Parameter("router.weight", (self.count, hidden), "matrix"),)

    def group_parameters(self, hidden: int, start: float, experts: range) -> tuple[Parameter, ...]:
        """gate, up and down of some experts."""
        return tuple(
            parameter
            for expert in experts
            for parameter in (
                Parameter(f"{expert}.gate.weight", (self.width, hidden), "matrix"),
                Parameter(f"{expert}.up.weight", (self.width, hidden), "matrix"),
                Parameter(f"{expert}.down.weight", (hidden, self.width), "matrix", start),
            )
        )

    def saved(self, hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
        """Nothing: what the router's backward needs, the experts need too (`routed`)."""
        return ()

    def scratch(self, hidden: int, tokens: int, types: Dtypes, backward: bool) -> tuple[TensorSpec, ...]:
        """The router's temporaries."""
        return (
            TensorSpec("mass", (self.count,), types.statistic),
            *((TensorSpec("dlogits", (tokens, self.count), types.compute),) if backward else ()),
        )

    def flops(self, hidden: int, tokens: int) -> float:
        """The router's."""
        return 2.0 * tokens * hidden * self.count

    def moved(self, tokens: int) -> int:
        """Logits and what follows from them."""
        return 4 * self.count * tokens

    def group_flops(self, hidden: int, tokens: int, experts: int) -> float:
        """FLOPs of a forward through `experts` of the experts, if all get as many tokens."""
        return 2.0 * tokens * self.chosen * 3 * hidden * self.width * experts / self.count

    def group_moved(self, hidden: int, tokens: int, experts: int) -> float:
        """Elements of activations that it reads and writes besides."""
        return tokens * self.chosen * (6 * hidden + 6 * self.width) * experts / self.count


def groups_of(count: int, hidden: int, width: int) -> int:
    """The fewest groups of at most GROUP_NUMEL parameters."""
    return -(-count // max(1, GROUP_NUMEL // (3 * hidden * width)))


def routed(experts: Experts, hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """Where a layer's tokens go: written by its router, read by its experts, forward and backward."""
    c, s, pairs = types.compute, types.statistic, tokens * experts.chosen
    return (
        TensorSpec("normed", (tokens, hidden), c),
        TensorSpec("logits", (tokens, experts.count), c),
        TensorSpec("share", (pairs,), s),
        TensorSpec("pairs", (pairs,), "int64"),
        TensorSpec("tokens", (pairs,), "int64"),
        TensorSpec("offsets", (experts.count + 1,), "int64"),
        TensorSpec("chosen", (pairs,), "int32"),
    )


def mixed(hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """The residual stream while experts add to it: in the wider dtype, so that it is rounded once."""
    return (TensorSpec("mixed", (tokens, hidden), types.statistic),)


def dispatched(experts: Experts, hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What the experts' backward hands on: gradients of the normed tokens and of the shares."""
    s = types.statistic
    return (
        TensorSpec("dnormed", (tokens, hidden), s),
        TensorSpec("dshare", (tokens * experts.chosen,), s),
    )


def experts_saved(experts: Experts, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What the experts' backward needs from their forward, for all groups of a layer."""
    pairs, c = tokens * experts.chosen, types.compute
    return (
        TensorSpec("gate", (pairs, experts.width), c),
        TensorSpec("up", (pairs, experts.width), c),
    )


def balance_spec(experts: Experts) -> TensorSpec:
    """Pairs and sums of probabilities per expert, over all layers and tokens of a step."""
    return TensorSpec("balance", (2, experts.count), "float64")
