"""Modules of one's own through the command line: trained as a plain loop trains them, judged, exported."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.bench import MAIN, Done
from tests.cli.modules import COUNT, HELD_OUT, MODULE, STEPS, Modules, entries, state, trained
from tests.exactness.user_modules import Points, image_of, make
from torch import nn

from packmule.kernels.contract import Kernels
from packmule.models.modules.samples import split
from packmule.spec.plan import Plan


@pytest.fixture(scope="module")
def done(modules: Modules) -> Done:
    """A run to its end, at a placement drawn at random."""
    rng = random.Random(modules.seed)
    wishes = {f"hardware__{kind}": rng.choice(["ram", "disk"]) for kind in ("state", "gradients", "inputs")}
    update = rng.choice(["after-backward", "on-fetch"])
    if wishes["hardware__state"] == "ram":
        wishes["hardware__inputs"] = "auto"
    path = modules.job("modules", train__update=update, checkpoint__save_steps=2, **wishes)
    return modules.run("train", path.name, "--json").succeeded()


def test_a_run_equals_a_plain_loop_to_the_bit(
    done: Done, modules: Modules, kernels: Kernels, one_thread: None
) -> None:
    run = modules.bench.folder / "modules"
    plan = Plan.parse_json((run / "plan.json").read_text(), "plan.json")
    case, trace, image = modules.plain(plan, kernels)
    assert trained(run) == trace
    assert state(run) == image
    logged = [tuple(entry["rows"]) for entry in entries(run) if "rows" in entry]
    assert logged == [case.samples.numbers_at(6 * step, 6) for step in range(STEPS)]
    assert image != image_of(case.shape, case.masters, None, "float32")


def test_the_budget_is_kept_and_predicted(done: Done) -> None:
    terms = done.named("report")[0]["terms"]["peak_ram_bytes"]
    assert terms["measured"] <= terms["predicted"] <= 900e6


def test_what_a_run_exports_is_the_state_dict_of_the_modules(
    done: Done, modules: Modules, kernels: Kernels, one_thread: None
) -> None:
    run = modules.bench.folder / "modules"
    made = make(reports=True)
    whole = nn.Module()
    whole.embed, whole.blocks, whole.head = made.embed, made.blocks, made.head
    found = load_file(run / "final" / "model.safetensors")
    whole.load_state_dict(found)
    assert found["blocks.0.gain"].ndim == 0
    assert found["embed.positions"].equal(made.embed.positions)
    modules.run("export", "modules/checkpoint-2", "exported", "--dtype", "float16").succeeded()
    early = load_file(modules.bench.folder / "exported" / "model.safetensors")
    assert early.keys() == found.keys()
    assert early["head.logits.weight"].dtype == torch.float16
    # As a plain evaluation of the loaded modules.
    samples = Points(modules.seed, COUNT)
    _, held_out = split(COUNT, HELD_OUT, modules.seed)
    batch = torch.utils.data.default_collate([samples[int(number)] for number in held_out])
    whole.eval()
    with torch.no_grad():
        x = made.embed(batch)
        for block in made.blocks:
            x = block(x, batch) if hasattr(block, "labels") else block(x)
        losses, more = made.head(x, batch)
    last = [entry for entry in entries(run) if "eval/loss" in entry][-1]
    assert last["step"] == STEPS
    assert last["eval/loss"] == pytest.approx(float(losses.double().mean()), rel=1e-5)
    assert last["eval/accuracy"] == pytest.approx(float(more["accuracy"].double().mean()))
    assert "eval/perplexity" not in last and last["eval/targets"] == HELD_OUT


def test_eval_imports_what_it_is_told_to_and_nothing_else(done: Done, modules: Modules) -> None:
    assert f"--import {MODULE}" in modules.run("eval", "modules").refused()
    found = modules.run("eval", "modules", "--import", MODULE, "--json").succeeded().json
    last = [entry for entry in entries(modules.bench.folder / "modules") if "eval/loss" in entry][-1]
    assert found["loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
    assert (found["accuracy"], found["rows"]) == (last["eval/accuracy"], HELD_OUT)
    assert found["perplexity"] is None


def test_what_a_run_is_can_be_asked_and_verified(done: Done, modules: Modules) -> None:
    described = modules.run("info", "modules", "--json").succeeded().json
    assert (described["modules"], described["samples"]) == (f"{MODULE}:make", COUNT)
    assert described["step"] == described["total steps"] == STEPS
    assert [*described["held-out accuracy"]] == ["step 0", "step 3", f"step {STEPS}"]
    modules.run("verify", "modules").succeeded()
    assert "know no tokens" in modules.run("generate", "modules", "--prompt", "a").refused()
    assert "no place in a .gguf file" in modules.run("export", "modules", "m.gguf").refused()
    again = modules.run("train", "modules.yaml").succeeded()
    assert "The run is complete" in again.out and "(state dict)" in again.out


CODE = """
import json, os, time
from tests.exactness import user_modules

class Points(user_modules.Points):
    def __getitem__(self, index):
        while os.path.exists("hold") and step() == 2:
            time.sleep(0.02)
        return super().__getitem__(index)

def step():
    try:
        return json.load(open("killed/HEAD.json"))["step"]
    except FileNotFoundError:
        return None

def make(**arguments):
    made = user_modules.make(**arguments)
    {change}
    return made
"""


def test_a_killed_run_goes_on_with_the_same_bits_and_the_same_modules(
    modules: Modules, kernels: Kernels, one_thread: None
) -> None:
    code, run = modules.bench.folder / "changing.py", modules.bench.folder / "killed"
    code.write_text(CODE.format(change="pass"))
    factories = {"model__factory": "changing.py:make", "data__factory": "changing.py:Points"}
    # A step's commit ends it: the data tells by HEAD where the run is.
    path = modules.job("killed", hardware__state="disk", train__update="after-backward", **factories)
    held = modules.bench.folder / "hold"
    held.touch()
    kill_after(modules, path, run, step=2)
    assert head_step(run) == 2
    held.unlink()

    code.write_text(CODE.format(change="made.blocks[1].norm = user_modules.nn.LayerNorm(12, bias=False)"))
    said = modules.run("train", path.name).refused()
    assert "`blocks.1` has no parameter `norm.bias`, which it had" in said

    code.write_text(CODE.format(change="pass"))
    update = random.Random(modules.seed).choice(["after-backward", "on-fetch"])
    words = ("--update", update, "--hardware.state", "ram", "--ram", "850MB")
    modules.run("train", path.name, *words).succeeded()
    plan = Plan.parse_json((run / "plan.json").read_text(), "plan.json")
    _, trace, image = modules.plain(plan, kernels)
    assert trained(run) == trace
    assert state(run) == image


def kill_after(modules: Modules, path: Path, run: Path, step: int) -> None:
    """Start, and `kill -9` parent and child once a step is committed."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "train", path.name],
        cwd=modules.bench.folder,
        env=modules.bench.variables(PYTHONPATH=modules.path),
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while head_step(run) < step:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    for pid in (*children(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def head_step(run: Path) -> int:
    try:
        return int(json.loads((run / "HEAD.json").read_text())["step"])
    except (OSError, ValueError):
        return -1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "made.head.forward = lambda x, batch: x[7]",
            "`head` failed with IndexError: index 7 is",
        ),
        ("made.blocks[2].forward = lambda x: x[:, :1].sum()", "`blocks.2` gave () for a batch of 1"),
    ],
)
def test_code_that_fails_is_named_before_anything_is_trained(
    modules: Modules, change: str, said: str
) -> None:
    (modules.bench.folder / "failing.py").write_text(CODE.format(change=change))
    path = modules.job("failing", model__factory="failing.py:make")
    assert said in modules.run("plan", path.name).refused()
