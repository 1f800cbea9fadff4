"""`packmule train` end to end: what it prints and keeps, and what the same line does the next time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.bench import Bench, Done

from packmule.spec.job import load_job
from packmule.spec.plan import Plan

PHASES = ("load", "step", "commit", "evaluation", "sample", "resume", "export")


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """Loss by step; a step that is there twice fails."""
    found = [(entry["step"], entry["train/loss"]) for entry in entries(run) if "train/loss" in entry]
    assert len(found) == len(dict(found))
    return dict(found)


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def after(text: str, line: str) -> list[str]:
    """The lines of a table: indented, below its title."""
    lines = text.splitlines()
    start = lines.index(line) + 1
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("  ")), len(lines))
    return lines[start:stop]


# What a run shows


def test_a_run_shows_machine_data_and_plan(trained: Done) -> None:
    for title in ("machine", "data", "plan for 900 MB of RAM", "predicted", "given up for the budget"):
        assert after(trained.out, title)
    assert trained.err == ""


def test_a_run_shows_the_bytes_of_every_phase_and_their_sum_is_right(trained: Done) -> None:
    header, *rows = after(trained.out, "memory by phase, MB")
    names = header.split()
    table = {row.split()[0]: row.split()[1:] for row in rows if row.split()[0] in PHASES}
    assert table.keys() == set(PHASES)
    for values in table.values():
        amounts = [0.0 if value == "-" else float(value.replace(",", "")) for value in values]
        by_name = dict(zip(names, amounts, strict=True))
        parts = sum(value for name, value in by_name.items() if name not in ("RAM", "disk"))
        assert parts == pytest.approx(by_name["RAM"], abs=0.6 * len(names))


def test_a_run_shows_progress_with_memory_and_budget(trained: Done) -> None:
    first = next(line for line in trained.out.splitlines() if line.startswith("step 1/6 "))
    for part in ("loss ", "tokens/s", " now, ", " peak, 900 MB budget", "ETA "):
        assert part in first


def test_a_run_shows_perplexity_and_samples_before_and_after(trained: Done, bench: Bench) -> None:
    for step in (0, 3, 6):
        assert f"step {step}: held-out loss " in trained.out
        assert f"step {step}: a sample, the prompt in brackets\n  | [the mule]" in trained.out
    perplexity = {e["step"]: e["eval/perplexity"] for e in entries(bench.folder / "run") if "eval/loss" in e}
    line = f"{perplexity[0]:.3f} at step 0, {perplexity[6]:.3f} at step 6"
    assert any(line in row for row in after(trained.out, "result"))
    assert perplexity[6] < perplexity[0]


def test_a_run_shows_predicted_measured_and_error_as_it_keeps_them(trained: Done, bench: Bench) -> None:
    # Of six steps the first warms up, and two write snapshots.
    header, *rows = after(trained.out, "predicted and measured, over 3 steps")
    assert header.split() == ["predicted", "measured", "error"]
    report = json.loads((bench.folder / "run" / "report.json").read_text())
    assert len(rows) - 1 == len(report["terms"]) == 8
    peak = report["terms"]["peak_ram_bytes"]
    shown = next(row for row in rows if "peak RAM" in row).split()[-1]
    assert shown == f"{peak['predicted'] / peak['measured'] - 1:+.1%}"
    assert peak["measured"] <= 900e6


def test_a_run_keeps_the_files_that_the_guide_names(trained: Done, bench: Bench) -> None:
    run = bench.folder / "run"
    names = {path.name for path in run.iterdir()}
    files = {"config.yaml", "plan.json", "probe.json", "report.json", "log.jsonl", "HEAD.json", "state.bin"}
    assert files <= names
    assert {"model", "data", "final", "checkpoint-4", "checkpoint-6"} <= names
    assert "checkpoint-2" not in names  # two are kept
    assert not list(run.rglob("*.tmp"))
    job = load_job((run / "config.yaml").read_text(), "config.yaml")
    assert (job.train.max_steps, job.hardware.ram) == (6, 900_000_000)
    assert Plan.parse_json((run / "plan.json").read_text(), "plan.json").budget_bytes == 900_000_000


def test_the_log_has_each_step_once_with_its_learning_rate(trained: Done, bench: Bench) -> None:
    found = [entry for entry in entries(bench.folder / "run") if "train/loss" in entry]
    assert [entry["step"] for entry in found] == [1, 2, 3, 4, 5, 6]
    assert found[0]["train/learning_rate"] == pytest.approx(1e-2)
    assert sorted(len(set(entry["rows"])) for entry in found) == [4] * 6
    assert all(0 < entry["data_seconds"] <= entry["seconds"] for entry in found)


# The same line again


def test_the_same_line_says_that_nothing_is_left(trained: Done, bench: Bench) -> None:
    before = {p: p.stat().st_mtime_ns for p in (bench.folder / "run").rglob("*") if p.name != "lock"}
    done = bench.run("train", "run.yaml").succeeded()
    assert done.out.startswith("The run is complete: all 6 steps are done. Nothing to do.\n")
    assert "at step 0" in done.out
    after_it = {p: p.stat().st_mtime_ns for p in (bench.folder / "run").rglob("*") if p.name != "lock"}
    assert {p for p in before if p.is_file() and before[p] != after_it.get(p)} == set()


def test_a_missing_export_is_made_again(bench: Bench) -> None:
    bench.job("export_again", train__max_steps=1, data__val_size=0)
    bench.run("train", "export_again.yaml").succeeded()
    final = bench.folder / "export_again" / "final"
    kept = weights(final.parent)
    for path in final.iterdir():
        path.unlink()
    final.rmdir()
    done = bench.run("train", "export_again.yaml").succeeded()
    assert "resuming after step 1 of 1" in done.out
    assert weights(final.parent) == kept


def test_json_lines_are_all_that_standard_output_has(bench: Bench) -> None:
    bench.job("lines", train__max_steps=2, train__sample_prompt="the mule", train__sample_tokens=3)
    done = bench.run("train", "lines.yaml", "--json").succeeded()
    names = [event["event"] for event in done.events]
    assert names[:3] == ["machine", "data", "plan"]
    assert names[-1] == "report"
    assert [event["step"] for event in done.named("step")] == [1, 2]
    assert [event["step"] for event in done.named("evaluation")] == [0, 2]
    assert {"resident_bytes", "peak_bytes", "loss", "seconds", "tokens"} <= done.named("step")[0].keys()
    Plan.parse(done.named("plan")[0]["plan"], "the event")
    again = bench.run("train", "lines.yaml", "--json").succeeded()
    assert [event["event"] for event in again.events] == ["complete"]


def test_quiet_leaves_results_only(bench: Bench) -> None:
    bench.job("quiet", train__max_steps=1)
    done = bench.run("train", "quiet.yaml", "--quiet").succeeded()
    assert "machine" not in done.out
    assert "plan for" not in done.out
    assert "step 1: held-out loss" in done.out
    assert after(done.out, "result")


# A run that was stopped, and other budgets


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """A run of four steps in one go, in RAM."""
    bench.job("whole", hardware__state="ram")
    bench.run("train", "whole.yaml").succeeded()
    return bench.folder / "whole"


def back_to_step_2(run: Path) -> None:
    """Leave a run of four steps with nothing but its snapshot of step 2."""
    shutil.rmtree(run / "checkpoint-4")
    for name in ("HEAD.json", "state.bin"):
        (run / name).write_bytes(b"damaged")
    assert (run / "checkpoint-2").exists()


@pytest.mark.parametrize(("first", "second"), [("disk", "ram"), ("ram", "disk")])
def test_another_budget_and_placement_at_resume_keep_every_bit(
    bench: Bench, whole: Path, first: str, second: str
) -> None:
    name = f"stopped_{first}"
    job = bench.job(name, checkpoint__save_steps=2)
    bench.run("train", job.name, "--hardware.state", first, "--ram", "800MB").succeeded()
    run = bench.folder / name
    back_to_step_2(run)
    done = bench.run("train", job.name, "--hardware.state", second, "--ram", "1.2GB").succeeded()
    assert "Going back to checkpoint-2." in done.out
    assert "step 4/4 " in done.out
    assert losses(run) == losses(whole)
    assert weights(run) == weights(whole)


def test_other_numerics_need_renumber(bench: Bench, whole: Path) -> None:
    job = bench.job("renumber", checkpoint__save_steps=2)
    bench.run("train", job.name).succeeded()
    run = bench.folder / "renumber"
    back_to_step_2(run)
    message = bench.run("train", job.name, "--precision", "bf16-mixed").refused()
    assert "`numerics.precision` was 'fp32', is 'bf16-mixed'" in message
    assert "--renumber" in message
    bench.run("train", job.name, "--precision", "bf16-mixed", "--renumber").succeeded()
    found, expected = losses(run), losses(whole)
    assert [found[1], found[2]] == [expected[1], expected[2]]
    assert found[4] != expected[4]
    assert found[4] == pytest.approx(expected[4], rel=0.05)
