"""A mixture of experts against transformers' blocks and a plain loop over experts, under autograd."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from tests.parity.plain import TYPES, poisoned
from tests.parity.samples import relative
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from packmule.kernels.contract import Kernels
from packmule.models import experts as bodies
from packmule.models.views import TORCH_DTYPES
from packmule.shapes import bodies as shapes
from packmule.shapes import experts as specs
from packmule.shapes.experts import Experts

LIMIT = {"fp32": 1e-5, "fp64": 1e-12}
SKEWS = ("even", "skewed", "few")
"""Tokens spread by chance; most of them at some experts; all of them at the same k."""


def random_experts(rng: random.Random, renormalize: bool) -> Experts:
    count = rng.randint(3, 9)
    return Experts(
        count=count, chosen=rng.randint(1, count - 1), width=2 * rng.randint(5, 20) + 1,
        renormalize=renormalize, balance=0.0, groups=rng.randint(1, count),
    )  # fmt: skip


@dataclass
class Sample:
    """One layer's weights, its normed input and the gradient of its output, in float64."""

    experts: Experts
    x: Tensor
    dy: Tensor
    weights: dict[str, Tensor]

    @classmethod
    def random(cls, rng: random.Random, experts: Experts, tokens: int, skew: str) -> Sample:
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        hidden = rng.choice((16, 21, 40))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).double() * size[-1] ** -0.5

        f = experts.width
        weights = {"router.weight": normal(experts.count, hidden)}
        for e in range(experts.count):
            weights[f"{e}.gate.weight"], weights[f"{e}.up.weight"] = normal(f, hidden), normal(f, hidden)
            weights[f"{e}.down.weight"] = normal(hidden, f)
        x = normal(tokens, hidden) * hidden**0.5
        x[:, 0] = 1.0
        order = torch.randperm(experts.count, generator=generator)
        few = 12.0 * (order < experts.chosen)
        weights["router.weight"][:, 0] = {"even": 0.0 * order, "skewed": 1.0 * order, "few": few}[skew]
        return cls(experts, x.float().double(), normal(tokens, hidden), weights)

    def to(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: value.to(dtype) for name, value in self.weights.items()}


Outcome = dict[str, Tensor]


def ours(
    sample: Sample,
    kernels: Kernels,
    precision: str,
    keep: bool = True,
    groups: int | None = None,
    balance: Tensor | None = None,
    before: Outcome | None = None,
    capacity: int | None = None,
) -> Outcome:
    """Output, gradients by name ("x" the input's), loads and probabilities. Every buffer is full of
    NaN beforehand.

    Args:
        keep: gate and up are kept for the backward.
        balance: [E], added to the gradient of every token's probabilities.
        before: gradients to add to.
    """
    types = TYPES[precision]
    c, s, g = (TORCH_DTYPES[name] for name in (types.compute, types.statistic, types.gradient))
    experts = replace(sample.experts, groups=groups or sample.experts.groups)
    tokens, hidden = sample.x.shape
    capacity = capacity or tokens
    weights, first = sample.to(c), before is None
    grads = {n: torch.full_like(w, torch.nan, dtype=g) for n, w in weights.items()} if first else before
    router = experts.scratch(hidden, capacity, types, True)

    def room(backward: bool) -> dict[str, Tensor]:
        own = shapes.experts_scratch(experts, hidden, capacity, types, backward, keep)
        return poisoned((*own, *router))

    routed = poisoned(specs.routed(experts, hidden, capacity, types))
    routed["normed"][:tokens] = sample.x.to(c)
    statistics = torch.zeros(2, experts.count, dtype=torch.float64)
    bodies.route(kernels, experts, weights["router.weight"], tokens, routed, room(False), statistics)
    saved = poisoned(specs.experts_saved(experts, capacity, types)) if keep else None
    mixed = poisoned(specs.mixed(hidden, capacity, types))["mixed"]
    mixed[:tokens] = 0
    for some in experts.ranges():
        bodies.experts_forward(kernels, experts, some, weights, tokens, routed, saved, room(False), mixed)

    dy = torch.full((capacity, hidden), torch.nan, dtype=c)
    dy[:tokens] = sample.dy.to(c)
    dispatched = poisoned(specs.dispatched(experts, hidden, capacity, types))
    for number, some in enumerate(reversed(experts.ranges())):
        bodies.experts_backward(
            kernels,
            experts,
            some,
            weights,
            tokens,
            routed,
            saved,
            room(True),
            dy,
            dispatched,
            grads,
            first,
            number == 0,
        )
    dx = torch.full((tokens, hidden), torch.nan, dtype=c)
    even = torch.zeros(experts.count, dtype=s) if balance is None else balance.to(s)
    bodies.route_backward(
        kernels, experts, weights["router.weight"], routed, dispatched, even,
        grads["router.weight"], first, room(True), dx,
    )  # fmt: skip
    return {"out": mixed[:tokens], "x": dx, **grads, "load": statistics[0], "mass": statistics[1]}


def loop(sample: Sample, balance: Tensor | None = None) -> Outcome:
    """A loop over tokens and their experts, in float64."""
    experts = sample.experts
    leaves = {name: w.clone().requires_grad_() for name, w in sample.weights.items()}
    x = sample.x.clone().requires_grad_()
    with torch.enable_grad():
        p = (x @ leaves["router.weight"].T).softmax(1)
        rows = []
        for token, row in enumerate(p):
            best = sorted(range(experts.count), key=lambda e: -float(row[e].detach()))[: experts.chosen]
            whole = sum(row[e] for e in best) if experts.renormalize else 1.0
            total = torch.zeros_like(x[0])
            for e in best:
                gate, up = leaves[f"{e}.gate.weight"] @ x[token], leaves[f"{e}.up.weight"] @ x[token]
                act = gate * torch.sigmoid(gate) * up
                total = total + row[e] / whole * (leaves[f"{e}.down.weight"] @ act)
            rows.append(total)
        out = torch.stack(rows)
        even = torch.zeros(experts.count, dtype=torch.float64) if balance is None else balance
        ((out * sample.dy).sum() + (p.sum(0) * even).sum()).backward()
    grads = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
    return {"out": out.detach(), "x": x.grad, **grads}


def theirs(sample: Sample, dtype: torch.dtype) -> Outcome:
    """transformers' block: Mixtral's divides shares by their sum, Qwen3-MoE's is told not to."""
    experts, hidden = sample.experts, sample.x.shape[1]
    if experts.renormalize:
        block = MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=hidden, intermediate_size=experts.width, num_local_experts=experts.count,
                num_experts_per_tok=experts.chosen, experts_implementation="eager",
            )
        )  # fmt: skip
    else:
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                hidden_size=hidden, moe_intermediate_size=experts.width, num_experts=experts.count,
                num_experts_per_tok=experts.chosen, norm_topk_prob=False, experts_implementation="eager",
            )
        )  # fmt: skip
    block = block.to(dtype)
    named = sample.to(dtype)
    with torch.no_grad():
        block.gate.weight.copy_(named["router.weight"])
        for e in range(experts.count):
            both = torch.cat((named[f"{e}.gate.weight"], named[f"{e}.up.weight"]))
            block.experts.gate_up_proj[e].copy_(both)
            block.experts.down_proj[e].copy_(named[f"{e}.down.weight"])
    x = sample.x.to(dtype).requires_grad_()
    with torch.enable_grad():
        out = block(x[None])[0]
        (out * sample.dy.to(dtype)).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "router.weight": block.gate.weight.grad}
    for e in range(experts.count):
        gate, up = block.experts.gate_up_proj.grad[e].chunk(2)
        found |= {f"{e}.gate.weight": gate, f"{e}.up.weight": up}
        found[f"{e}.down.weight"] = block.experts.down_proj.grad[e]
    return found


def assert_close(mine: Outcome, reference: Outcome, limit: float) -> None:
    """Norm-wise. The router's gradient is a difference of nearly equal terms: with one expert a token,
    whose share is 1 whatever the router says, there is nothing left of it but rounding."""
    for name, value in reference.items():
        assert torch.isfinite(mine[name]).all(), name
        if not value.any():
            assert float(mine[name].norm()) < limit, f"{name} is not zero"
            continue
        error = float((mine[name].double() - value.double()).norm())
        terms = 0.3 * float(reference["x"].norm()) if name == "router.weight" else 0.0
        size = max(float(value.norm()), terms)
        assert error < limit * size, f"{name}: {error / size:.2g}"


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("renormalize", (False, True))
@pytest.mark.parametrize("precision", LIMIT)
def test_outputs_and_every_gradient_equal_a_loop_over_experts(
    kernels: Kernels, rng: random.Random, precision: str, renormalize: bool, skew: str
) -> None:
    experts = random_experts(rng, renormalize)
    sample = Sample.random(rng, experts, rng.randint(1, 60), skew)
    balance = torch.rand(experts.count).double() * 0.1
    mine = ours(sample, kernels, precision, keep=rng.random() < 0.5, balance=balance)
    assert_close(mine, loop(sample, balance), LIMIT[precision])
    # Every pair that was routed has been through its expert.
    assert int(mine["load"].sum()) == len(sample.x) * experts.chosen
    assert float(mine["mass"].sum()) == pytest.approx(len(sample.x), rel=1e-5)
    if skew == "few":
        assert int((mine["load"] == 0).sum()) == experts.count - experts.chosen


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("renormalize", (False, True))
def test_outputs_and_every_gradient_equal_transformers(
    kernels: Kernels, rng: random.Random, renormalize: bool, skew: str
) -> None:
    sample = Sample.random(rng, random_experts(rng, renormalize), 50, skew)
    assert_close(ours(sample, kernels, "fp32"), theirs(sample, torch.float32), LIMIT["fp32"])
    # Its router computes shares in float32 whatever the weights are.
    assert_close(ours(sample, kernels, "fp64"), theirs(sample, torch.float64), 3e-6)


@pytest.mark.parametrize("precision", TYPES)
def test_groups_recomputation_and_capacity_change_no_bit(
    kernels: Kernels, rng: random.Random, precision: str
) -> None:
    experts = random_experts(rng, True)
    sample = Sample.random(rng, experts, 70, "skewed")
    one = ours(sample, kernels, precision, groups=1)
    for groups in range(1, experts.count + 1):
        keep, capacity = rng.random() < 0.5, rng.choice((None, 100))
        other = ours(sample, kernels, precision, keep=keep, groups=groups, capacity=capacity)
        assert all(torch.equal(one[name], other[name]) for name in one), groups


@pytest.mark.parametrize("precision", ("fp32", "fp64"))
def test_gradients_are_added_to_what_is_there(kernels: Kernels, rng: random.Random, precision: str) -> None:
    experts = random_experts(rng, True)
    parts = [Sample.random(rng, experts, n, "few") for n in (30, 11)]
    parts[1] = replace(parts[1], weights=parts[0].weights)
    if parts[0].x.shape[1] != parts[1].x.shape[1]:
        width = parts[0].x.shape[1]
        parts[1] = replace(parts[1], x=torch.randn(11, width).double(), dy=torch.randn(11, width).double())
    before = ours(parts[0], kernels, precision)
    total = ours(parts[1], kernels, precision, before={name: before[name] for name in parts[0].weights})
    one, two = (loop(part) for part in parts)
    want = {name: one[name] + two[name] for name in parts[0].weights}
    assert_close(total, {**want, "x": two["x"]}, LIMIT[precision])


@pytest.mark.parametrize("narrow", ("bf16-mixed", "bf16-wide"))
def test_bf16_stays_near_float32(kernels: Kernels, rng: random.Random, narrow: str) -> None:
    """Routing may differ where two experts are nearly equal, so experts are kept apart."""
    experts = replace(random_experts(rng, True), count=4, chosen=2, groups=2)
    sample = Sample.random(rng, experts, 60, "few")
    sample.weights["router.weight"][:, 1:] *= 0.1
    sample.weights["router.weight"][:, 0] = torch.randperm(4) * 1.0
    low, high = (ours(sample, kernels, precision) for precision in (narrow, "fp32"))
    assert torch.equal(low["load"], high["load"])
    for name in ("out", "x", *sample.weights):
        if high[name].any():
            assert relative(low[name], high[name]) < 0.05, name


def test_the_balance_loss_and_its_gradient_equal_transformers(kernels: Kernels, rng: random.Random) -> None:
    """Over all layers and micro-batches at once: counts and sums add up, and the gradient of every
    layer follows from the totals."""
    experts = replace(random_experts(rng, True), balance=rng.uniform(0.01, 1))
    layers, tokens = rng.randint(1, 4), rng.randint(3, 40)
    logits = [torch.randn(tokens, experts.count, dtype=torch.float64) * 2 for _ in range(layers)]
    leaves = tuple(each.clone().requires_grad_() for each in logits)
    with torch.enable_grad():
        want = load_balancing_loss_func(leaves, experts.count, experts.chosen)
        (experts.balance * want).backward()
    totals = torch.zeros(2, experts.count, dtype=torch.float64)
    chosen = [torch.empty(tokens, experts.chosen, dtype=torch.int32) for _ in logits]
    for row, picks in zip(logits, chosen, strict=True):
        share, sums = torch.empty(tokens, experts.chosen).double(), torch.empty(experts.count).double()
        kernels.route(row, True, picks, share, sums)
        totals[0] += torch.bincount(picks.flatten(), minlength=experts.count)
        totals[1] += sums
    rows = tokens * layers
    assert bodies.balance_loss(experts, totals, rows) == pytest.approx(float(want), rel=1e-6)
    balance = bodies.balance_gradient(experts, totals, rows, torch.float64)
    for row, picks, leaf in zip(logits, chosen, leaves, strict=True):
        dlogits = torch.empty_like(row)
        nothing = torch.zeros(tokens, experts.chosen, dtype=torch.float64)
        kernels.route_backward(row, picks, nothing, balance, True, dlogits)
        # It counts in float32.
        error = float((dlogits - leaf.grad).norm())
        assert error < 1e-6 * (float(leaf.grad.norm()) + float(balance.norm()))
