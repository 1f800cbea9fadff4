"""Runs of modules of one's own: warm starts, the best step kept, unknown metrics, memory that runs out."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.bench import Done
from tests.cli.modules import COUNT, MODULE, STEPS, Modules, entries, plan_of, state, trained
from tests.exactness.user_modules import ModuleCase, Points, plain_losses, plain_run

from packmule.kernels.contract import Kernels
from packmule.models.modules.samples import SampleBatch, Samples

BEST_STEPS = 8


def judged_on(modules: Modules) -> dict[str, int]:
    """The samples that runs are judged on which do not hold some of theirs out."""
    return {"seed": modules.seed + 1, "count": 15}


@pytest.fixture(scope="module")
def judged(modules: Modules) -> Done:
    """A run judged on samples of their own after each step, at a rate at which it may well get worse."""
    path = modules.job(
        "judged", train__eval_steps=1, train__best_metric="accuracy", train__max_steps=BEST_STEPS,
        data__val_factory=f"{MODULE}:Points", data__val_arguments=judged_on(modules),
        checkpoint__save_best=True, checkpoint__save_steps=4, optim__learning_rate=0.1,
    )  # fmt: skip
    return modules.run("train", path.name, "--json").succeeded()


def test_the_step_that_the_heads_own_metric_calls_best_is_kept(
    judged: Done, modules: Modules, kernels: Kernels, one_thread: None
) -> None:
    run = modules.bench.folder / "judged"
    found = {e["step"]: e["eval/accuracy"] for e in entries(run) if "eval/accuracy" in e}
    assert [*found] == list(range(BEST_STEPS + 1))
    best = max(found, key=lambda step: (found[step], -step))
    _, images = plain_run(modules.case(plan_of(run), held_out=0), BEST_STEPS, kernels)
    assert state(run / "best") == images[best]
    assert state(run) == images[-1] != images[0]
    assert modules.run("info", "judged", "--json").succeeded().json["best step"] == best
    modules.run("verify", "judged/best").succeeded()


def test_samples_of_their_own_are_judged_on_and_all_others_trained_on(
    judged: Done, modules: Modules, one_thread: None
) -> None:
    run = modules.bench.folder / "judged"
    assert {row for e in entries(run) for row in e.get("rows", ())} == set(range(COUNT))
    own = Samples(Points(**judged_on(modules)), np.arange(15), modules.seed)
    case = modules.case(plan_of(run), held_out=0)
    for name in ("judged", "judged/best"):
        folder = modules.bench.folder / name
        losses = plain_losses(case, masters_of(case, folder), own.micro_batch(range(15)), None)
        step = json.loads((folder / "HEAD.json").read_text())["step"]
        (logged,) = (e for e in entries(run) if e["step"] == step and "eval/loss" in e)
        assert logged["eval/loss"] == pytest.approx(float(losses.double().mean()), rel=1e-5)
    said = modules.run("eval", "judged/best", "--import", MODULE, "--json").succeeded().json
    assert (said["step"], said["rows"], said["accuracy"]) == (step, 15, logged["eval/accuracy"])
    assert said["loss"] == pytest.approx(logged["eval/loss"], rel=1e-6)
    described = modules.run("info", "judged", "--json").succeeded().json
    assert (described["validation data set"], described["validation samples"]) == (f"{MODULE}:Points", 15)


def masters_of(case: ModuleCase, run: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of a run's last commit."""
    found = []
    for block, image in zip(case.shape.blocks(), state(run), strict=True):
        found.append(
            {
                entry.name: torch.frombuffer(
                    bytearray(image[entry.offset : entry.offset + entry.bytes]), dtype=torch.float32
                ).view(entry.shape)
                for entry in block.layout("float32").entries
            }
        )
    return found


def test_a_warm_start_begins_with_the_weights_of_another_run_and_nothing_else_of_it(
    judged: Done, modules: Modules, kernels: Kernels, one_thread: None, long: bool
) -> None:
    origin = random.Random(modules.seed).choice(["judged", "judged/checkpoint-4"])
    path = modules.job("warm", model__path=origin)
    modules.run("train", path.name).succeeded()
    run = modules.bench.folder / "warm"
    drawn = modules.case(plan_of(run))
    masters = masters_of(drawn, modules.bench.folder / origin)
    trace, images = plain_run(replace(drawn, masters=masters), STEPS, kernels)
    assert trained(run) == trace
    assert state(run) == images[-1]
    assert trace != plain_run(drawn, STEPS, kernels)[0]

    if not long:
        return
    # What it has begun with is not needed to go on.
    shutil.move(modules.bench.folder / "judged", modules.bench.folder / "elsewhere")
    try:
        modules.run("train", path.name, "--max-steps", "6").succeeded()
    finally:
        shutil.move(modules.bench.folder / "elsewhere", modules.bench.folder / "judged")
    assert len(trained(run)) == 6


OTHERS = """
from tests.exactness import user_modules

def make(**arguments):
    made = user_modules.make(**arguments)
    made.head.logits = user_modules.nn.Linear(12, 9)
    return made
"""


def test_a_warm_start_from_something_else_is_refused(judged: Done, modules: Modules) -> None:
    folder = modules.bench.folder
    (folder / "others.py").write_text(OTHERS)
    path = modules.job("other", model__path="judged", model__factory="others.py:make")
    assert modules.run("train", path.name).refused() == (
        "error: The weights in `model.path` = 'judged' are of other modules: `head.logits.weight` is [9, 12] "
        "(matrix), and was [7, 12] (matrix).\nhint: give a run of the same modules, or leave it out\n"
    )
    for name, what in (("model", "no run"), ("text", "a run of a model that reads text")):
        path = modules.job("other", model__path=name)
        if name == "text":
            (folder / name).mkdir()
            (folder / name / "config.yaml").write_text(modules.bench.job("a text").read_text())
        assert modules.run("train", path.name).refused() == (
            f"error: `model.path` = {name!r} is {what}.\n"
            "hint: beside `model.factory` give a run of the same modules, or leave it out\n"
        )
    path = modules.bench.job("text from modules", model__path="judged", model__init="pretrained")
    assert "is made of modules of your own" in modules.run("train", path.name).refused()


def test_a_metric_that_the_head_does_not_report_is_refused_before_anything_is_trained(
    modules: Modules,
) -> None:
    measured = {"checkpoint__save_best": True, "train__early_stop_patience": 2}
    key = random.Random(modules.seed).choice([*measured])
    path = modules.job("unknown", train__best_metric="acuracy", **{key: measured[key]})
    said = modules.run(random.Random(modules.seed + 1).choice(["train", "plan"]), path.name).refused()
    assert said == (
        "error: `train.best_metric` = 'eval/acuracy' is not measured.\nhint: did you mean `eval/accuracy`?\n"
    )
    assert not (modules.bench.folder / "unknown" / "HEAD.json").exists()


SHORT = """
import json, torch
from tests.exactness import user_modules

class Short(user_modules.Mix):
    def forward(self, x):
        most = {2: 5, 3: 2}.get(step(), 6)  # rows that there is memory for, in step 3 and after it
        if len(x) > most and torch.is_grad_enabled() == (most == 5):
            torch.empty(1 << 45)
        return super().forward(x)

def step():
    try:
        return json.load(open("short/HEAD.json"))["step"]
    except FileNotFoundError:
        return None

def make(**arguments):
    made = user_modules.make(**arguments)
    made.blocks[1].__class__ = Short
    return made
"""


@dataclass(frozen=True)
class Cut(ModuleCase):
    """A case whose micro-batches become smaller on the way."""

    def batches(self, step: int) -> list[SampleBatch]:
        cut = (6,) if step < 2 else (3, 3) if step < 3 else (2, 1, 2, 1)
        ids, found = list(self.samples.numbers_at(6 * step, 6)), []
        for count in cut:
            found.append(self.samples.micro_batch(ids[:count]))
            del ids[:count]
        return found


def test_memory_that_runs_out_halves_the_micro_batches_and_nothing_else(
    modules: Modules, kernels: Kernels, one_thread: None
) -> None:
    """Once in a step, once in an evaluation; each time the steps before are kept. (A step's commit ends
    it: the modules tell by HEAD where the run is.)"""
    (modules.bench.folder / "short.py").write_text(SHORT)
    path = modules.job(
        "short", model__factory="short.py:make", model__arguments={"reports": True},
        train__micro_batch_size=6, hardware__state="disk", train__update="after-backward",
        checkpoint__commit_steps=1,
    )  # fmt: skip
    done = modules.run("train", path.name, "--json").succeeded()
    run = modules.bench.folder / "short"
    notes = [e["text"] for e in done.named("note") if "micro-batches" in e["text"]]
    assert ["can't allocate memory" in note for note in notes] == [True, True]
    assert "Going on in micro-batches of 3+3 rows instead of 6:" in notes[0]
    assert "Going on in micro-batches of 2+1+2+1 rows instead of 3+3:" in notes[1]
    assert [(e["step"], e["changed"]) for e in entries(run) if "changed" in e] == [
        (2, notes[:1]),
        (3, notes[1:]),
    ]
    case = modules.case(plan_of(run), dropout=0.0)
    trace, images = plain_run(Cut(**vars(case)), STEPS, kernels)
    assert trained(run) == trace
    assert state(run) == images[-1]
    assert [e["step"] for e in entries(run) if "eval/loss" in e] == [0, 3, STEPS]
    # As if memory had been enough, but for rounding.
    numerics = case.plan.numerics.model_copy(update={"micro_rows": (6,)})
    at_once = replace(case, plan=case.plan.model_copy(update={"numerics": numerics}))
    expected, _ = plain_run(at_once, STEPS, kernels)
    assert trace != expected
    assert [loss for loss, _ in trace] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
