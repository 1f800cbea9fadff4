"""Methods that keep part of the state of AdamW: the engine against a plain torch loop over transformers
with torch.optim and clip_grad_norm_, in float64; and what their graphs hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.exactness.runs import COSTS, Case, Data, Trace, make_case, make_plan, run_steps
from tests.fault.recording_disk import RecordingDisk
from tests.parity.architectures import Config
from tests.parity.oracle import InFloat64, by_block, oracle
from tests.parity.plain import Named, PlainModel
from torch import Tensor

from packmule.graph.kinds import BufferKind, TaskKind, Tier
from packmule.graph.model import PlannedModel
from packmule.graph.step import StepGraph
from packmule.graph.training import build_step
from packmule.kernels.contract import Kernels
from packmule.models.views import views
from packmule.models.weights.names import hf_tensors
from packmule.optim.schedules import rates
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Numerics, Placement, Plan
from packmule.spec.turns import Turns, turn_at

RUN = Path("/run")
STEPS = 7
LAYERS = 3
EXACT = 1e-10
"""Relative difference allowed in float64."""

Rule = Callable[[list[dict]], torch.optim.Optimizer]


def config(tied: bool) -> Config:
    """A tiny Llama."""
    return {
        "model_type": "llama", "vocab_size": 83, "hidden_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 41,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def torch_run(
    model: PlainModel, tied: bool, numerics: Numerics, data: Data, rule: Rule
) -> tuple[Trace, list[Named]]:
    """(loss and gradient norm of each step, parameters at the end) of a loop as anybody would write it."""
    decay = numerics.optimizer.weight_decay
    with torch.enable_grad(), InFloat64():
        twin = oracle(model, config(tied))
        groups = [
            {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer, trace = rule(groups), []
        for step in range(STEPS):
            active, rate, fresh = turn(model, numerics, step)
            if fresh:
                optimizer = rule(groups)
            for name, p in twin.named_parameters():
                p.requires_grad_(name in active)
            rows = data.rows(step, numerics.rows, numerics.max_seq_length)
            documents = [torch.tensor(document) for row in rows for document in row]
            total = torch.zeros(())
            for document in documents:
                logits = twin(input_ids=document[None]).logits[0]
                loss = torch.nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
                total = total + loss
            total = total / sum(len(document) - 1 for document in documents)
            optimizer.zero_grad()
            total.backward()
            limit = float("inf") if numerics.clip is None else numerics.clip
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), limit, foreach=False)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            trace.append((float(total.detach()), float(norm)))
    return trace, by_block(model, {name: p.detach() for name, p in twin.named_parameters()})


def turn(model: PlainModel, numerics: Numerics, step: int) -> tuple[set[str], float, bool]:
    """(transformers' names of what a step trains, its learning rate, whether moments begin at zero)."""
    turns, blocks = numerics.turns, list(model.blocks)
    everything = {tensor.name for block in blocks for tensor in hf_tensors(block)}
    if turns is None:
        return everything, rates(numerics, step).learning_rate, False
    units = [[block] for block in blocks]
    if model.shape.tied:
        units = [[blocks[0], blocks[-1]], *units[1:-1]]
    if not turns.ends:
        units = [[block] for block in blocks[1:-1]]
    count = -(-len(units) // turns.layers)
    number = step // turns.steps % count
    if turns.order == "descending":
        number = count - 1 - number
    chosen = units[number * turns.layers : (number + 1) * turns.layers]
    names = {tensor.name for unit in chosen for block in unit for tensor in hf_tensors(block)}
    if turns.method == "hift":  # the rate of the cycle's first step
        return names, rates(numerics, step - step % count).learning_rate, False
    return names, rates(numerics, step).learning_rate, step % turns.steps == 0


def masters(case: Case, image: list[bytes]) -> list[Named]:
    """The master weights in an image of the state."""
    found = []
    for block, planes in zip(case.shape.blocks(), image, strict=True):
        place = block.layout("float64")
        found.append(views(torch.frombuffer(bytearray(planes[: place.bytes]), dtype=torch.uint8), place))
    return found


def agree(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).norm()) <= EXACT * float(theirs.norm())


def check_against_torch(plan: Plan, tied: bool, rule: Rule, seed: int, kernels: Kernels) -> None:
    """A run through the engine ends where the torch loop does."""
    shape = ModelShape.from_config(config(tied), "tiny")
    case, disk = make_case(shape, plan, 0, seed, kernels), RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    trace = run_steps(engine, case.data, 0, STEPS)
    engine.close()
    expected, parameters = torch_run(case.model(kernels), tied, plan.numerics, case.data, rule)
    for (loss, norm), (their_loss, their_norm) in zip(trace, expected, strict=True):
        assert loss == pytest.approx(their_loss, rel=EXACT)
        assert norm == pytest.approx(their_norm, rel=EXACT)
    _, image = case.state(RUN, kernels, disk)
    for block, ours, theirs in zip(shape.blocks(), masters(case, image), parameters, strict=True):
        for p in block.parameters:
            assert agree(ours[p.name], theirs[p.name]), (block.name, p.name)


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    """Its coupled decay is the decoupled one, since nothing else scales a gradient."""
    return torch.optim.SGD(groups, lr=0.0)


class AdaLomo(torch.optim.Optimizer):
    """Lv et al. 2024 (arXiv:2310.10195), algorithm 1, in the dtype of the parameters; the decay of the
    moment and the scale of weight decay as in its authors' program."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        beta = 1 - self.steps**-0.8
        for group in self.param_groups:
            for p in group["params"]:
                square, state = p.grad**2 + 1e-30, self.state[p]
                for axis in range(p.dim()):
                    mean = square.mean(dim=1 - axis) if p.dim() == 2 else square
                    state[axis] = beta * state.get(axis, torch.zeros_like(mean)) + (1 - beta) * mean
                v = state[0]
                if p.dim() == 2:
                    v = torch.outer(state[0], state[1]) / state[0].mean()
                u = p.grad / v.sqrt()
                u = u / max(1.0, float(u.square().mean().sqrt()))
                rate = group["lr"] * max(1e-3, float(p.square().mean().sqrt()))
                p.mul_(1 - rate * group["weight_decay"]).sub_(rate * u)


def adamw(numerics: Numerics) -> Rule:
    numbers = numerics.optimizer
    betas = (numbers.beta1, numbers.beta2)
    return lambda groups: torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=numbers.eps, foreach=False)


@pytest.mark.parametrize("name", ("adamw", "lomo", "adalomo"))
@pytest.mark.parametrize("clip", (None, 0.3))
def test_updates_on_backward_are_those_of_torch_with_clip_grad_norm(
    name: str, clip: float | None, kernels: Kernels, rng: random.Random, seed: int
) -> None:
    """A clip is known from a first backward."""
    plan = make_plan(
        "fp64",
        rng.choice(((3,), (2, 1))),
        clip=clip,
        placement=Placement(state=rng.choice(("ram", "disk")), weights="state"),
        update="on-backward",
        recompute=tuple(rng.random() < 0.5 for _ in range(LAYERS)),
        optimizer={"rule": name},
        steps=STEPS,
        schedule={"learning_rate": 0.1 if name == "lomo" else 1e-2},
    )
    rule = {"lomo": sgd, "adalomo": AdaLomo}.get(name) or adamw(plan.numerics)
    check_against_torch(plan, rng.random() < 0.5, rule, seed, kernels)


@pytest.mark.parametrize("update", ("after-backward", "on-backward"))
@pytest.mark.parametrize("state", ("ram", "disk"))
@pytest.mark.parametrize("method", ("hift", "badam"))
def test_blocks_that_take_turns_are_trained_as_torch_trains_them(
    method: str, state: str, update: str, kernels: Kernels, rng: random.Random, seed: int
) -> None:
    """Of HiFT moments and age are each block's own; of BAdam they begin anew with every turn."""
    turns = Turns(
        method=method,
        layers=rng.choice((1, 2)),
        steps=1 if method == "hift" else 2,
        order=rng.choice(("ascending", "descending")),
        ends=rng.random() < 0.8,
    )
    plan = make_plan(
        "fp64",
        rng.choice(((3,), (2, 1))),
        clip=rng.choice((None, 0.3)),
        placement=Placement(
            state=state, weights=rng.choice(("state", "ram")), inputs=rng.choice(("ram", "disk"))
        ),
        update=update,
        recompute=tuple(rng.random() < 0.5 for _ in range(LAYERS)),
        steps=STEPS,
        turns=turns,
    )
    check_against_torch(plan, rng.random() < 0.5, adamw(plan.numerics), seed, kernels)


def test_a_random_order_of_hift_is_kept_and_one_of_badam_drawn_anew(rng: random.Random) -> None:
    groups, seed = rng.randint(5, 9), rng.randrange(2**31)
    for method in ("hift", "badam"):
        turns = Turns(method=method, order="random")
        cycles = [
            [turn_at(turns, groups, seed, cycle * groups + place).group for place in range(groups)]
            for cycle in range(4)
        ]
        assert all(sorted(cycle) == list(range(groups)) for cycle in cycles)
        assert (cycles[0] == cycles[1] == cycles[2] == cycles[3]) == (method == "hift")


@pytest.mark.parametrize("weights", ("state", "ram", "disk"))
@pytest.mark.parametrize("tied", (True, False))
def test_only_the_active_group_has_gradients_and_state_on_the_move(
    tied: bool, weights: str, rng: random.Random
) -> None:
    """Of the others masters at most are read, and backward stops at the lowest active block."""
    shape = ModelShape.from_config(config(tied), "tiny")
    plan = make_plan(
        "bf16-mixed", placement=Placement(state="disk", weights=weights), recompute=(True,) * LAYERS,
        update=rng.choice(("after-backward", "on-backward")), clip=None,
        turns=Turns(method=rng.choice(("hift", "badam")), layers=rng.choice((1, 2))),
    )  # fmt: skip
    model = PlannedModel(shape, plan)
    sizes, before = model.plane_bytes, 0.0
    for group, active in enumerate(model.groups):
        graph = build_step(model, COSTS, 1.0, group=group)
        written = transferred(graph, TaskKind.WRITE_STATE)
        assert written == {block: 3 * sizes[block] for block in active}
        assert held(graph, BufferKind.STATE) == 0
        assert held(graph, BufferKind.GRADIENT) <= sum(sizes[block] for block in active)
        trained = set(graph.buffer_block[graph.buffer_kind == BufferKind.GRADIENT].tolist())
        assert trained == set(active)
        for block, size in transferred(graph, TaskKind.READ_STATE).items():
            assert block in active or (weights == "state" and size % sizes[block] == 0)
        passed = graph.block[graph.kind == TaskKind.LAYER_BACKWARD].tolist()
        assert sorted(passed) == list(range(max(1, active[0]), LAYERS + 1))
        backward = float(graph.seconds[np.isin(graph.kind, BACKWARD)].sum())
        assert group < 2 or backward < before  # training a block takes longer than the embedding
        before = backward


BACKWARD = (TaskKind.LAYER_BACKWARD, TaskKind.EMBED_BACKWARD)


def transferred(graph: StepGraph, kind: TaskKind) -> dict[int, int]:
    """Bytes by block that tasks of a kind move."""
    found: dict[int, int] = {}
    for task in np.flatnonzero(graph.kind == kind).tolist():
        block = int(graph.block[task])
        found[block] = found.get(block, 0) + int(graph.moved[task])
    return found


@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("clip", (None, 1.0))
def test_lomo_holds_its_masters_and_the_gradient_of_a_block(
    tied: bool, clip: float | None, rng: random.Random
) -> None:
    """Lv et al. 2023, table 1: no optimizer state, and gradients of what is updated next."""
    shape = ModelShape.from_config(config(tied), "tiny")
    plan = make_plan(
        "fp32", recompute=(True,) * LAYERS, update="on-backward", clip=clip, prefetch=rng.choice((0, 1)),
        optimizer={"rule": "lomo"},
    )  # fmt: skip
    model = PlannedModel(shape, plan)
    graph = build_step(model, COSTS, 1.0)
    sizes = [block.layout("float32").bytes for block in shape.blocks()]
    assert held(graph, BufferKind.STATE) == sum(sizes)
    # A tied embedding's gradient begins at the head; an update may lag a visit behind.
    most = max(a + b for a, b in itertools.pairwise(sizes[1:]))
    assert held(graph, BufferKind.GRADIENT) <= max(most + tied * sizes[0], sizes[0] + sizes[1])


def test_adalomo_keeps_rows_and_columns(rng: random.Random) -> None:
    """Of each matrix r + c values, of a vector as many as it has; whole pages per block."""
    shape = ModelShape.from_config(config(False), "tiny")
    plan = make_plan("fp32", recompute=(True,) * LAYERS, update="on-backward", clip=None,
                     optimizer={"rule": "adalomo"})  # fmt: skip
    model = PlannedModel(shape, plan)
    for block, (masters, factors) in zip(model.blocks, model.plane_sizes, strict=True):
        values = sum(sum(p.shape) for p in block.parameters)
        tensors = sum(len(p.shape) for p in block.parameters)
        assert 4 * values <= factors < 4 * values + 64 * tensors + 4096
        assert masters == block.layout("float32").bytes
    graph = build_step(model, COSTS, 1.0)
    assert held(graph, BufferKind.STATE) == sum(sum(sizes) for sizes in model.plane_sizes)


def held(graph: StepGraph, kind: BufferKind) -> int:
    """Most bytes of one kind that are live in the arena at once, in program order."""
    members = np.flatnonzero((graph.buffer_kind == kind) & (graph.buffer_tier == Tier.RAM))
    sizes, kept = graph.buffer_bytes[members], graph.buffer_persistent[members]
    first, last = graph.buffer_first[members], graph.buffer_last[members]
    return max(int(sizes[kept | ((first <= t) & (t <= last))].sum()) for t in range(graph.tasks))


def test_two_backwards_take_no_more_memory_than_one(kernels: Kernels, rng: random.Random) -> None:
    """But for block inputs, which are kept until the second has passed."""
    shape = ModelShape.from_config(config(False), "tiny")
    graphs = {}
    for clip in (None, 1.0):
        plan = make_plan("fp32", recompute=(True,) * LAYERS, update="on-backward", clip=clip)
        graphs[clip] = build_step(PlannedModel(shape, plan), COSTS, 1.0)
    assert held(graphs[1.0], BufferKind.GRADIENT) == held(graphs[None], BufferKind.GRADIENT)
    for kind in (TaskKind.LAYER_BACKWARD, TaskKind.HEAD_LOSS, TaskKind.EMBED_BACKWARD):
        counts = [int((graph.kind == kind).sum()) for graph in graphs.values()]
        assert counts[1] == 2 * counts[0]
    forwards = [int((graph.kind == TaskKind.LAYER_FORWARD).sum()) for graph in graphs.values()]
    assert forwards[0] == forwards[1]
