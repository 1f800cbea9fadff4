"""A mixture of experts as explicit forward and backward task bodies. No autograd, nothing kept.

Letters: N tokens, H hidden, E experts, k experts of a token, F feed-forward width of an expert, M
capacity of a buffer; a pair is a (token, expert) that was routed, n of them to one expert. Buffers
are those of packmule.shapes.experts; `first` means as in packmule.models.decoder.

Products are grouped by expert: pairs are sorted by expert, so each expert's rows are gathered once,
go through plain matrix products of just as many rows, and are added back. The cost follows the
pairs and nothing is padded or dropped (MegaBlocks, Gale et al. 2022, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.context import Decoder, Tensors
from packmule.models.norms import norm_backward, norm_forward
from packmule.models.products import input_gradient, linear, weight_gradient

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels
    from packmule.shapes.experts import Experts
    from packmule.shapes.layer import LayerShape


@dataclass(frozen=True)
class _Pairs:
    """Those of one expert: its number, and which of the layer's pairs (and their tokens) it has."""

    expert: int
    rows: slice
    pairs: Tensor
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.pairs)

    def weight(self, name: str) -> str:
        return f"{self.expert}.{name}.weight"


def _by_expert(routed: Tensors, experts: Iterable[int]) -> Iterator[_Pairs]:
    bounds = routed["offsets"].tolist()
    for expert in experts:
        rows = slice(bounds[expert], bounds[expert + 1])
        yield _Pairs(expert, rows, routed["pairs"][rows], routed["tokens"][rows])


def open_forward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    routed: Tensors,
    mixed: Tensor,
    balance: Tensor | None,
) -> None:
    """Norm and router of a layer's second half; its experts come next.

    Args:
        x: c [N, H]. saved: layer_saved, of which "norm2"'s are written.
        scratch: the half's scratch and room for products.
        routed: written. mixed: s [M, H], set to x.
        balance: float64 [2, E]: pairs and probabilities are added, where not None.
    """
    kernels, n = decoder.kernels, len(x)
    norm_forward(kernels, layer.norm, weights, "norm2", x, routed["normed"][:n], saved)
    assert layer.experts is not None
    route(kernels, layer.experts, weights["router.weight"], n, routed, scratch, balance)
    kernels.accumulate(mixed[:n], x, True)


def close_backward(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    saved: Tensors,
    scratch: Tensors,
    routed: Tensors,
    dispatched: Tensors,
    balance: Tensor,
    dy: Tensor,
    dx: Tensor,
    grads: Tensors,
    first: bool,
    recompute: bool,
) -> None:
    """Gradients of `open_forward`, after those of all experts.

    Args:
        x, dy, dx: c [N, H]; dx may be dy, which reaches x directly too.
        scratch: besides, "normed" c [M, H].
        balance: s [E], as `balance_gradient` makes it.
        recompute: the norm's statistics are not in `saved` yet.
    """
    kernels, normed = decoder.kernels, scratch["normed"][: len(x)]
    if recompute:
        norm_forward(kernels, layer.norm, weights, "norm2", x, normed, saved)
    assert layer.experts is not None
    route_backward(
        kernels, layer.experts, weights["router.weight"], routed, dispatched, balance,
        grads.get("router.weight"), first, scratch, normed,
    )  # fmt: skip
    norm_backward(kernels, layer.norm, weights, "norm2", normed, x, saved, dx, grads, dy, first)


def route(
    kernels: Kernels,
    experts: Experts,
    router: Tensor,
    tokens: int,
    routed: Tensors,
    scratch: Tensors,
    balance: Tensor | None,
) -> None:
    """Choose the experts of each token and sort the pairs.

    Args:
        router: c [E, H].
        tokens: N.
        routed: "normed" is read, the others are written.
        scratch: room for products and "mass" s [E].
        balance: float64 [2, E]: pairs of each expert, and sums of probabilities, are added.
    """
    n, k = tokens, experts.chosen
    logits = routed["logits"][:n]
    chosen, share = (routed[name][: n * k].view(n, k) for name in ("chosen", "share"))
    linear(routed["normed"][:n], router, logits, scratch)
    kernels.route(logits, experts.renormalize, chosen, share, scratch["mass"])
    kernels.dispatch(chosen, routed["pairs"][: n * k], routed["tokens"][: n * k], routed["offsets"])
    if balance is not None:
        balance[0] += routed["offsets"].diff()
        balance[1] += scratch["mass"]


def route_backward(
    kernels: Kernels,
    experts: Experts,
    router: Tensor,
    routed: Tensors,
    dispatched: Tensors,
    balance: Tensor,
    grad: Tensor | None,
    first: bool,
    scratch: Tensors,
    dnormed: Tensor,
) -> None:
    """Gradient of the normed tokens, through their experts and through the router.

    Args:
        dispatched: as all groups' `experts_backward` left it; "dnormed" is overwritten.
        balance: s [E], gradient of the load-balancing loss with respect to a token's probabilities.
        grad: g [E, H], the router's; None: it is frozen.
        dnormed: c [N, H], written.
        scratch: room for products and "dlogits" c [M, E].
    """
    n, k = len(dnormed), experts.chosen
    normed, dlogits = routed["normed"][:n], scratch["dlogits"][:n]
    chosen = routed["chosen"][: n * k].view(n, k)
    dshare, wide = dispatched["dshare"][: n * k].view(n, k), dispatched["dnormed"][:n]
    kernels.route_backward(routed["logits"][:n], chosen, dshare, balance, experts.renormalize, dlogits)
    weight_gradient(kernels, dlogits, normed, grad, first, scratch)
    input_gradient(dlogits, router, dnormed, scratch)
    kernels.accumulate(wide, dnormed, False)
    kernels.cast(dnormed, wide)


def experts_forward(
    kernels: Kernels,
    experts: Experts,
    group: range,
    weights: Tensors,
    tokens: int,
    routed: Tensors,
    saved: Tensors | None,
    scratch: Tensors,
    mixed: Tensor,
) -> None:
    """mixed[t] += share * expert(normed[t]) for the pairs of some experts.

    Args:
        group: which; their weights are "0.gate.weight" c [F, H], "0.up.weight" c [F, H],
            "0.down.weight" c [H, F] for expert 0.
        saved: experts_saved, of which these experts' rows are written, or None to keep nothing.
        scratch: experts_scratch.
        mixed: s [M, H].
    """
    for some in _by_expert(routed, group):
        if not len(some):
            continue
        rows = scratch["rows"][: len(some)]
        kernels.embedding(routed["normed"][:tokens], some.tokens, rows)
        gate, up = _gated(some, weights, rows, saved, scratch, run=True)
        act = scratch["act"][: len(some)]
        kernels.activate(gate, up, act, experts.activation)
        kernels.weigh(act, routed["share"], some.pairs)
        linear(act, weights[some.weight("down")], rows, scratch)  # rows have been used
        kernels.embedding_backward(rows, some.tokens, mixed[:tokens], False)


def experts_backward(
    kernels: Kernels,
    experts: Experts,
    group: range,
    weights: Tensors,
    tokens: int,
    routed: Tensors,
    saved: Tensors | None,
    scratch: Tensors,
    dy: Tensor,
    dispatched: Tensors,
    grads: Tensors,
    first: bool,
    opening: bool,
) -> None:
    """Gradients of `experts_forward` for some experts.

    Args:
        saved: experts_saved as the forward left it (its rows are overwritten: a backward runs
            once), or None: gate and up are computed again, with the same bits.
        scratch: experts_scratch(backward=True).
        dy: c [M, H], gradient of the layer's output; not changed.
        dispatched: gradients of the normed tokens (added; zeroed first where `opening`: these are
            the first experts of the layer to run) and of the pairs' shares (written).
        grads: g, by parameter name; empty: frozen. An expert without tokens has a gradient of zeros.
    """
    if opening:
        dispatched["dnormed"][:tokens].zero_()
    # Last expert first, as groups are: how they are cut does not change the order of additions.
    for some in _by_expert(routed, reversed(group)):
        named = {name: some.weight(name) for name in ("gate", "up", "down")}
        if not len(some):
            if first and grads:
                for name in named.values():
                    grads[name].zero_()
            continue
        rows, drows, act, dact = (scratch[name][: len(some)] for name in ("rows", "drows", "act", "dact"))
        kernels.embedding(routed["normed"][:tokens], some.tokens, rows)
        kernels.embedding(dy[:tokens], some.tokens, drows)
        gate, up = _gated(some, weights, rows, saved, scratch, run=saved is None)
        kernels.activate(gate, up, act, experts.activation)
        input_gradient(drows, weights[named["down"]], dact, scratch)
        kernels.weigh_backward(dact, act, routed["share"], some.pairs, dispatched["dshare"])
        weight_gradient(kernels, drows, act, grads.get(named["down"]), first, scratch)
        kernels.activate_backward(dact, gate, up, gate, up, experts.activation)
        weight_gradient(kernels, gate, rows, grads.get(named["gate"]), first, scratch)
        weight_gradient(kernels, up, rows, grads.get(named["up"]), first, scratch)
        input_gradient(gate, weights[named["gate"]], drows, scratch)  # drows have been used
        input_gradient(up, weights[named["up"]], drows, scratch, add=True)
        kernels.embedding_backward(drows, some.tokens, dispatched["dnormed"][:tokens], False)


def _gated(
    some: _Pairs, weights: Tensors, rows: Tensor, saved: Tensors | None, scratch: Tensors, run: bool
) -> tuple[Tensor, Tensor]:
    """An expert's gate and up: c [n, F], where they are kept or in scratch; computed if `run`."""
    where, place = (scratch, slice(0, len(some))) if saved is None else (saved, some.rows)
    gate, up = where["gate"][place], where["up"][place]
    if run:
        linear(rows, weights[some.weight("gate")], gate, scratch)
        linear(rows, weights[some.weight("up")], up, scratch)
    return gate, up


def balance_loss(experts: Experts, balance: Tensor, rows: int) -> float:
    """The load-balancing loss of Fedus et al. 2022 (equations 4 to 6) for k experts a token, over
    all layers and tokens at once, as transformers defines it: E * sum(f * P) with f = pairs / rows
    and P = probabilities / rows of each expert.

    Args:
        balance: float64 [2, E], as `route` added it up.
        rows: tokens times layers that route.
    """
    return experts.count * float(torch.dot(*balance)) / rows**2


def balance_gradient(experts: Experts, balance: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[E], the gradient of `experts.balance` times that loss with respect to the probabilities of
    any token in any layer: balance * E * f / rows.

    f counts choices, which have no gradient, and the loss is linear in P. So the gradient of one
    token depends on the others by f alone: with f gathered in the forward of all layers and
    micro-batches, each layer's backward adds its own part, and the sum is exact.
    """
    return (balance[0] * (experts.balance * experts.count / rows**2)).to(dtype)
