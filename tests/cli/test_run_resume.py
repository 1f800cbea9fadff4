"""What a resumed run does with a changed line: goes on, says so, or refuses with the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.bench import Bench, Done

from packmule.checkpoint.reader import StateReader
from packmule.kernels import checksum
from packmule.tiers.disk import PosixDisk, aligned_buffer


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def head(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "HEAD.json").read_text())
    return found


def losses(run: Path) -> dict[int, float]:
    return {entry["step"]: entry["train/loss"] for entry in entries(run) if "train/loss" in entry}


def planes(run: Path, plane: str) -> np.ndarray:
    """One plane of all blocks of a commit."""
    parts = []
    with StateReader.open(PosixDisk(), run, checksum()) as reader:
        for block, record in enumerate(reader.layout.blocks):
            buffer = aligned_buffer(record.plane_bytes)
            reader.read_plane(block, plane, buffer)
            parts.append(np.frombuffer(bytes(buffer), np.float32))
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def first(bench: Bench) -> Path:
    """Four steps of a schedule that is flat from the second on, all copies kept."""
    job = bench.job(
        "first", optim__lr_scheduler="constant", checkpoint__save_steps=2, checkpoint__save_total_limit=9,
        data__val_size=0.1, train__micro_batch_size=2,
    )  # fmt: skip
    bench.run("train", job.name).succeeded()
    return bench.folder / "first"


def copy(bench: Bench, first: Path, name: str) -> Path:
    shutil.copytree(first, bench.folder / name)
    return bench.folder / name


def test_a_longer_run_goes_on_with_the_bits_of_one_that_was_long_from_the_start(
    bench: Bench, first: Path
) -> None:
    run = copy(bench, first, "longer")
    done = bench.run("train", "first.yaml", "--output-dir", "longer", "--max-steps", "6").succeeded()
    assert "note: `train.max_steps` was 4, is 6: the schedule is drawn anew for the new length" in done.out
    assert "resuming after step 4 of 6" in done.out
    assert any("changed" in entry and entry["step"] == 4 for entry in entries(run))
    bench.run("train", "first.yaml", "--output-dir", "long", "--max-steps", "6").succeeded()
    assert losses(run) == losses(bench.folder / "long")
    final = "final/model.safetensors"
    assert (run / final).read_bytes() == (bench.folder / "long" / final).read_bytes()
    message = bench.run("train", "first.yaml", "--output-dir", "longer", "--max-steps", "5").refused()
    assert "has done 6 steps; this job ends after 5" in message


def test_rates_decay_and_clipping_change_aloud_and_are_in_the_next_commit(bench: Bench, first: Path) -> None:
    run = copy(bench, first, "rates")
    flags = ("--learning-rate", "0.003", "--weight-decay", "0.2", "--max-grad-norm", "0", "--max-steps", "5")
    done = bench.run("train", "first.yaml", "--output-dir", "rates", *flags).succeeded()
    assert "note: `optim.learning_rate` was 0.01, is 0.003: the new schedule goes on" in done.out
    assert "note: `optim.max_grad_norm` was 1.0, is null: from the next step on" in done.out
    numerics = head(run)["numerics"]
    assert numerics["schedule"]["learning_rate"] == 0.003
    assert (numerics["optimizer"]["weight_decay"], numerics["clip"]) == (0.2, None)
    last = next(entry for entry in entries(run) if entry["step"] == 5 and "train/loss" in entry)
    assert last["train/learning_rate"] == 0.003
    assert numerics["micro_rows"] == [2, 2]  # as the run was


def test_data_that_was_added_begins_an_epoch_where_the_run_stands(bench: Bench, first: Path) -> None:
    run = copy(bench, first, "added")
    bench.write_texts("more.jsonl", ["the mill grinds at noon by the hill"] * 30)
    flags = ("--dataset", "text.jsonl", "--dataset", "more.jsonl", "--max-steps", "6")
    done = bench.run("train", "first.yaml", "--output-dir", "added", *flags).succeeded()
    assert "note: The data changed: an epoch of the new data begins at the step the run is at." in done.out
    found = head(run)
    assert found["data"] != head(first)["data"]
    assert (found["cursor"], found["data_cursor"]) == (24, 16)
    assert found["data_tokens"] == head(first)["tokens"]
    fresh = bench.run(
        "train", "first.yaml", "--output-dir", "fresh_data", *flags[:4], "--max-steps", "2"
    ).succeeded()
    assert fresh.code == 0
    rows = {e["step"]: e["rows"] for e in entries(run) if "train/loss" in e}
    wanted = {e["step"]: e["rows"] for e in entries(bench.folder / "fresh_data") if "train/loss" in e}
    assert (rows[5], rows[6]) == (wanted[1], wanted[2])


def test_the_same_text_under_another_name_changes_nothing(bench: Bench, first: Path) -> None:
    run = copy(bench, first, "renamed")
    shutil.copy(bench.folder / "text.jsonl", bench.folder / "same.jsonl")
    done = bench.run(
        "train", "first.yaml", "--output-dir", "renamed", "--dataset", "same.jsonl", "--max-steps", "5"
    ).succeeded()
    assert "The data changed" not in done.out
    assert head(run)["data_cursor"] == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--seed", "7"), "`train.seed` was 42, is 7"),
        (("--max-seq-length", "16"), "`train.max_seq_length` was 32, is 16"),
        (("--global-batch-size", "8"), "`train.global_batch_size` was 4, is 8"),
        (("--val-size", "0.3"), "`data.val_size` was 0.1, is 0.3"),
        (("--model.init", "pretrained"), "`model.init` was 'random', is 'pretrained'"),
    ],
)
def test_what_cannot_change_is_refused_with_a_warm_start_as_the_way_out(
    bench: Bench, first: Path, flags: tuple[str, ...], named: str
) -> None:
    before = (first / "HEAD.json").read_bytes()
    message = bench.run("train", "first.yaml", *flags).refused()
    assert named in message
    assert f"start another run from its weights: `--model {first} --output-dir NEW`" in message
    assert (first / "HEAD.json").read_bytes() == before


def test_other_rounding_needs_renumber(bench: Bench, first: Path) -> None:
    message = bench.run("train", "first.yaml", "--max-steps", "5", "--micro-batch-size", "1").refused()
    assert "`train.micro_batch_size` was 2, is 1" in message and "--renumber" in message
    message = bench.run("train", "first.yaml", "--max-steps", "5", "--threads", "2").refused()
    assert "`numerics.threads` was 1, is 2" in message and "--renumber" in message
    run = copy(bench, first, "renumbered")
    words = ("--output-dir", "renumbered", "--max-steps", "5", "--micro-batch-size", "1", "--renumber")
    done = bench.run("train", "first.yaml", *words).succeeded()
    assert "note: `train.micro_batch_size` was 2, is 1: sums are rounded otherwise." in done.out
    assert head(run)["numerics"]["micro_rows"] == [1, 1, 1, 1]


def test_a_run_can_begin_with_another_runs_checkpoint_and_ends_in_its_bits(bench: Bench, first: Path) -> None:
    words = ("train", "first.yaml", "--output-dir", "branch", "--resume", str(first / "checkpoint-2"))
    done = bench.run(*words).succeeded()
    assert "resuming after step 2 of 4" in done.out
    run = bench.folder / "branch"
    assert losses(run) == losses(first)
    assert (run / "state.bin").stat().st_size == (first / "state.bin").stat().st_size
    for plane in ("master", "m", "v"):
        assert planes(run, plane).tobytes() == planes(first, plane).tobytes()
    again = bench.run(*words).succeeded()
    assert "Nothing to do" in again.out
    message = bench.run(*words[:-1], str(first)).refused()
    assert "holds a run at step 4 that did not begin with" in message
    message = bench.run("train", "first.yaml", "--resume", str(first / "checkpoint-2")).refused()
    assert "use another --output-dir to go on from" in message
    message = bench.run("train", "first.yaml", "--output-dir", "new", "--resume", "nowhere").refused()
    assert "nowhere is not a run" in message


def test_a_warm_start_takes_weights_only(bench: Bench, first: Path) -> None:
    flags = (
        "--output-dir",
        "warm_start",
        "--model",
        str(first / "checkpoint-2"),
        "--seed",
        "5",
        "--max-steps",
        "1",
    )
    done = bench.run("train", "first.yaml", *flags, "--learning-rate", "0", "--model.init", "pretrained")
    done.succeeded()
    assert "starting: 1 steps" in done.out
    run = bench.folder / "warm_start"
    # With a rate of 0 the weights are those it began with; the moments are of one step.
    assert planes(run, "master").tobytes() == planes(first / "checkpoint-2", "master").tobytes()
    assert planes(run, "m").tobytes() != planes(first / "checkpoint-2", "m").tobytes()
    assert head(run)["step"] == 1
    assert bench.run("plan", "first.yaml", "--model", str(first), "--json").succeeded().json["order"]


def test_never_refuses_to_carry_on(bench: Bench, first: Path) -> None:
    message = bench.run("train", "first.yaml", "--resume", "never").refused()
    assert "holds a run at step 4" in message
    assert "another --output-dir" in message


def test_a_complete_run_is_left_alone(trained: Done, bench: Bench) -> None:
    done = bench.run("train", "run.yaml", "--logging-steps", "3", "--ram", "950MB").succeeded()
    assert "Nothing to do" in done.out
