"""Options of a run end to end: evaluation sets, early stop, the best copy, time limit, sinks, schedules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.cli.bench import Bench, Done
from tests.cli.tiny import texts


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def options(bench: Bench) -> Done:
    """A run that diverges on purpose, with most options at once; it stops early."""
    bench.write_texts("books.jsonl", texts(91, 8))
    bench.write_texts("code.jsonl", ["if x: y = [z]"] * 4)
    job = bench.job(
        "options", data__val_path={"books": "books.jsonl", "code": ["code.jsonl"]}, data__val_size=0,
        train__max_steps=40, train__eval_steps=2, train__best_metric="books/loss",
        train__early_stop_patience=2, train__micro_batch_size=1, checkpoint__save_best=True,
        optim__learning_rate=0.5, optim__lr_scheduler="wsd", optim__batch_warmup_steps=3,
        optim__batch_warmup_rows=1, optim__lr_scaling="linear", logging__report_to="tensorboard",
    )  # fmt: skip
    return bench.run("train", job.name).succeeded()


def test_named_sets_are_each_measured_and_told(options: Done, bench: Bench) -> None:
    found = [entry for entry in entries(bench.folder / "options") if "eval/books/loss" in entry]
    for entry in found:
        assert entry["eval/books/perplexity"] == pytest.approx(math.exp(entry["eval/books/loss"]))
        assert 0 <= entry["eval/books/accuracy"] <= 1
        assert entry["eval/books/bits_per_byte"] > 0
        assert f"step {entry['step']}: books loss {entry['eval/books/loss']:.4f}, perplexity " in options.out
    assert {entry["step"] for entry in entries(bench.folder / "options") if "eval/code/loss" in entry} == {
        entry["step"] for entry in found
    }
    assert "code perplexity" in options.out


def test_eval_of_a_named_set_repeats_what_was_logged(options: Done, bench: Bench) -> None:
    log = {entry["step"]: entry for entry in entries(bench.folder / "options") if "eval/code/loss" in entry}
    done = bench.run("eval", "options/best", "--set", "code", "--rows", "6", "--json").succeeded().json
    logged = log[done["step"]]
    assert done["loss"] == pytest.approx(logged["eval/code/loss"], rel=1e-6)
    assert done["bits_per_byte"] == pytest.approx(logged["eval/code/bits_per_byte"], rel=1e-6)
    assert "no evaluation set 'x'" in bench.run("eval", "options", "--set", "x").refused()


def test_the_run_stops_early_and_says_so_now_and_later(options: Done, bench: Bench) -> None:
    last = json.loads((bench.folder / "options" / "HEAD.json").read_text())["step"]
    assert last < 40
    assert f"Stopping early after step {last}: 2 evaluations without improvement" in options.out
    assert (bench.folder / "options" / "final" / "model.safetensors").exists()
    again = bench.run("train", "options.yaml").succeeded()
    assert again.out.startswith(f"The run is complete: it stopped early after step {last}. Nothing to do.\n")


def test_the_best_copy_is_of_the_best_step_and_can_be_exported(options: Done, bench: Bench) -> None:
    found = [
        (e["eval/books/loss"], e["step"]) for e in entries(bench.folder / "options") if "eval/books/loss" in e
    ]
    info = bench.run("info", "options/best", "--json").succeeded().json
    assert (info["kind"], info["step"]) == ("snapshot", min(found)[1])
    assert bench.run("info", "options", "--json").succeeded().json["best step"] == min(found)[1]
    bench.run("export", "options/best", "best_model", "--dtype", "float32").succeeded()
    assert (bench.folder / "best_model" / "model.safetensors").exists()
    assert "best" in bench.run("verify", "options", "--json").succeeded().json


def test_the_batch_warms_up_and_the_rate_with_it(options: Done, bench: Bench) -> None:
    found = [entry for entry in entries(bench.folder / "options") if "train/loss" in entry]
    assert [len(entry["rows"]) for entry in found[:5]] == [1, 2, 2, 4, 4]
    assert [entry["train/learning_rate"] for entry in found[1:4]] == pytest.approx([0.25, 0.25, 0.5])
    rows = [row for entry in found[:5] for row in entry["rows"]]
    assert len(set(rows)) == 13  # none twice in the first epoch
    assert "train/noise_trace" not in found[0] and "train/noise_trace" in found[3]


def test_tensorboard_has_files_and_the_marks_are_kept(options: Done, bench: Bench) -> None:
    run = bench.folder / "options"
    assert list((run / "tensorboard").iterdir())
    marks = json.loads((run / "sinks.json").read_text())["tensorboard"]
    assert marks["train"] == marks["eval"] == json.loads((run / "HEAD.json").read_text())["step"]


def test_a_time_limit_stops_the_run_and_the_same_line_goes_on(bench: Bench) -> None:
    job = bench.job("minutes", train__max_minutes=1e-4, train__max_steps=2, data__val_size=0)
    message = bench.run("train", job.name).refused(5)
    assert "Stopped after step 1 of 2: `train.max_minutes` = 0.0001" in message
    assert "the same command carries on" in message
    assert json.loads((bench.folder / "minutes" / "HEAD.json").read_text())["step"] == 1
    bench.run("train", job.name).succeeded()
    assert [e["step"] for e in entries(bench.folder / "minutes")] == [1, 2]


def test_options_that_cannot_work_are_refused_before_a_run(bench: Bench) -> None:
    job = bench.job("no_metric", checkpoint__save_best=True, train__best_metric="acuracy")
    assert "did you mean `eval/accuracy`?" in bench.run("train", job.name).refused()
    job = bench.job("no_set", data__val_path={"a": "nothing.jsonl"})
    assert "nothing.jsonl" in bench.run("train", job.name).refused()
    assert not (bench.folder / "no_set").exists()


PARTIAL = {
    "hift": (
        *("--optim", "lomo", "--update", "on-backward", "--hardware.state", "disk"),
        *("--block-schedule", "hift", "--optim.block_order", "random"),
    ),
    "badam": ("--use-badam", "true", "--badam-switch-interval", "2", "--badam-switch-mode", "descending"),
}
"""Two methods at once, with a clip that takes two backwards; and the other by its names elsewhere."""


@pytest.mark.parametrize("name", PARTIAL)
def test_a_method_of_partial_state_trains_stops_and_goes_on_like_one_that_did_not(
    name: str, bench: Bench
) -> None:
    """Through evaluation, a snapshot and export; the second half from Python or a shell is the same line."""
    job = bench.job("partial", train__eval_steps=2, checkpoint__save_steps=3, train__micro_batch_size=1)
    words = ("train", job.name, *PARTIAL[name])
    bench.run(*words, "--max-steps", "7", "--output-dir", f"{name}-whole").succeeded()
    planned = bench.run("plan", job.name, *PARTIAL[name], "--max-steps", "7").succeeded().out
    assert f"{name}: 3 groups" in planned
    assert ("LOMO keeps nothing else" in planned) == (name == "hift")
    whole = entries(bench.folder / f"{name}-whole")
    # The schedule is drawn for the length of the run, so it is cut short by time, not by steps.
    cut = (*words, "--max-steps", "7", "--output-dir", f"{name}-cut")
    bench.run(*cut, "--train.max_minutes", "0.00001")
    bench.run(*cut).succeeded()
    losses = [entry["train/loss"] for entry in whole if "train/loss" in entry]
    found = [e["train/loss"] for e in entries(bench.folder / f"{name}-cut") if "train/loss" in e]
    assert found == losses and len(losses) == 7
    files = [bench.folder / f"{name}-{end}" / "final" / "model.safetensors" for end in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    bench.run("verify", f"{name}-cut").succeeded()
    other = bench.run("train", job.name, "--max-steps", "7", "--output-dir", f"{name}-cut").refused()
    assert f"`optim.block_schedule` was '{name}'" in other


@pytest.mark.parametrize(
    ("words", "cause", "way"),
    [
        (("--block-schedule", "hift", "--update", "on-fetch"), "'on-fetch' leaves an update", "on-backward"),
        (
            ("--block-schedule", "badam", "--hardware.gradients", "disk"),
            "one group's gradient",
            "on-backward",
        ),
        (("--block-schedule", "badam", "--optim", "lomo"), "runs Adam on each block", "hift"),
        (("--block-schedule", "hift", "--optim.block_steps", "9"), "a turn of `hift` is one step", "badam"),
        (("--optim.block_order", "random"), "blocks that take turns", "hift"),
    ],
)
def test_combinations_that_do_not_exist_are_refused_with_a_way_out(
    words: tuple[str, ...], cause: str, way: str, bench: Bench
) -> None:
    message = bench.run("plan", bench.job("none").name, *words).refused()
    assert cause in message and way in message
