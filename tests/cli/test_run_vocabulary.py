"""A tied vocabulary in parts through the commands: killed, resumed, looked at, and begun from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.cli.bench import MAIN, Bench
from tests.fault.processes import Running, gone
from tokenizers import Tokenizer

STEPS = 6

WIDE = {"hidden_size": 16384, "head_dim": 8, "vocab_size": 320, "num_hidden_layers": 1}
"""Changes of the tiny model. Its table is a little larger than the 16 MiB that one part may be, and still is
with only bytes and a few words in it. 20 ids are no tokens."""

CHANGES = {
    "model__path": "large_words", "data__val_size": 6, "train__max_steps": STEPS,
    "train__micro_batch_size": 2, "train__recompute": True, "train__eval_steps": STEPS,
    # Updates during backward leave gradients on disk for nothing but a tied vocabulary in parts.
    "train__update": "on-backward", "hardware__state": "disk", "hardware__gradients": "disk",
}  # fmt: skip


def head(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "HEAD.json").read_text())
    return found


def logged(run: Path, metric: str) -> dict[int, float]:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {line["step"]: line[metric] for line in lines if metric in line}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    return found


FEW = ["the mule rests in shade", "noon by the mill", "over a hill and down to the mule"]


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """A run that nothing interrupts."""
    wide = bench.folder / "large_words"
    shutil.copytree(bench.folder / "model", wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | WIDE))
    job = bench.job("parted", **CHANGES)
    bench.run("train", job.name).succeeded()
    run = bench.folder / "parted"
    names = [block["name"] for block in head(run)["layout"]["blocks"]]
    assert names == ["embed0", "embed1", "layer0", "head"]
    return run


def killed(bench: Bench, name: str, step: int) -> Path:
    """The same job in another folder, both of its processes killed when it tells of a step."""
    words = ("train", "parted.yaml", "--output-dir", name, "--json")
    with Running([sys.executable, "-c", MAIN, *words], bench.variables(), bench.folder) as running:
        assert running.until(lambda event: event["event"] == "step" and event["step"] == step)
        children = running.children()
        for pid in (*children, running.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert running.end().code == 128 + signal.SIGKILL
        assert children and all(gone(pid, 30) for pid in children)
    return bench.folder / name


def test_a_killed_run_ends_in_the_bits_of_one_that_was_not(bench: Bench, whole: Path) -> None:
    run = killed(bench, "parted_killed", step=2)
    step = head(run)["step"]
    assert 2 <= step < STEPS and head(run)["numerics"]["vocabulary_parts"] == 2
    done = bench.run("train", "parted.yaml", "--output-dir", run.name).succeeded()
    assert f"resuming after step {step} of {STEPS}" in done.out
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert logged(run, metric) == logged(whole, metric)
    assert weights(run / "final") == weights(whole / "final")
    assert bench.run("verify", run.name, "--json").succeeded().json[run.name]["step"] == STEPS


def test_eval_and_export_see_one_table(bench: Bench, whole: Path) -> None:
    found = bench.run("eval", whole.name, "--rows", "6", "--json").succeeded().json
    assert found["loss"] == pytest.approx(logged(whole, "eval/loss")[STEPS], rel=1e-6)
    bench.run("export", whole.name, "parted_export", "--dtype", "float32").succeeded()
    assert weights(bench.folder / "parted_export") == weights(whole / "final")


@pytest.fixture(scope="module")
def pruned(bench: Bench, whole: Path) -> Path:
    """An export of it without the tokens that some texts do not use."""
    bench.write_texts("few_words.jsonl", FEW * 8)
    words = ("--dtype", "float32", "--prune-vocab", "--corpus", "few_words.jsonl")
    bench.run("export", whole.name, "parted_pruned", *words).succeeded()
    return bench.folder / "parted_pruned"


def test_a_pruned_export_has_the_rows_of_the_tokens_that_stay(whole: Path, pruned: Path) -> None:
    before, after = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (whole / "final", pruned))
    kept = [before.token_to_id(after.id_to_token(index)) for index in range(after.get_vocab_size())]
    assert len(kept) < before.get_vocab_size() and kept == sorted(kept)
    expected, found = tensors(whole / "final"), tensors(pruned)
    expected["model.embed_tokens.weight"] = expected["model.embed_tokens.weight"][kept]
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_run_with_the_cut_begins_from_a_pruned_export_of_one(bench: Bench, pruned: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    changes = CHANGES | {
        "model__path": pruned.name, "model__init": "pretrained", "data__path": "few_words.jsonl",
        "data__val_path": "few_words.jsonl", "train__eval_rows": None, "train__max_steps": 1,
        "train__eval_steps": 1, "optim__learning_rate": 0.0,
    }  # fmt: skip
    changes.pop("data__val_size")
    bench.run("train", bench.job("parted_again", **changes).name).succeeded()
    run = bench.folder / "parted_again"
    assert head(run)["numerics"]["vocabulary_parts"] == 2
    assert weights(run / "final") == weights(pruned)
    model = transformers.AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(pruned / "tokenizer.json"))
    loss, targets = 0.0, 0
    for text in FEW:
        ids = torch.tensor([*tokenizer.encode(text).ids, model.config.eos_token_id])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        targets += len(ids) - 1
    assert logged(run, "eval/loss")[0] == pytest.approx(loss / targets, rel=1e-5)
    assert logged(run, "eval/targets")[0] == 8 * targets


def test_a_run_without_the_cut_begins_from_one_with_it(bench: Bench, whole: Path) -> None:
    changes = CHANGES | {
        "model__path": whole.name, "model__init": "pretrained", "train__max_steps": 1, "train__eval_steps": 1,
        "train__update": "after-backward", "hardware__gradients": "ram", "optim__learning_rate": 0.0,
    }  # fmt: skip
    bench.run("train", bench.job("unparted", **changes).name).succeeded()
    run = bench.folder / "unparted"
    assert head(run)["numerics"]["vocabulary_parts"] == 1
    # With a rate of 0 the weights are those it began with.
    assert weights(run / "final") == weights(whole / "final")
    # Sums go through the whole vocabulary at once instead of part by part.
    assert logged(run, "eval/loss")[0] == pytest.approx(logged(whole, "eval/loss")[STEPS], rel=1e-6)
