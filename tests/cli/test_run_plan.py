"""`packmule plan`: its three forms, and that what it offers instead of a plan that does not fit holds."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.cli.bench import Bench, Done

from packmule.spec.plan import Plan
from packmule.spec.units import format_bytes

BIG = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip


def plan_of(done: Done) -> Plan:
    """The plan that `plan --json` printed; the data's examples are printed with it."""
    found = dict(done.json)
    assert found.pop("data")
    found.pop("wear")
    return Plan.parse(found, "standard output")


@pytest.fixture(scope="module")
def big(bench: Bench) -> Path:
    """A job whose state, gradients and activations are worth moving; it is planned only."""
    folder = bench.folder / "big_model"
    shutil.copytree(bench.folder / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **BIG}))
    return bench.job(
        "big_job", model__path="big_model", train__max_seq_length=1024, train__global_batch_size=4,
        train__max_steps=100,
    )  # fmt: skip


def test_the_json_is_the_plan_and_all_of_standard_output(bench: Bench, big: Path) -> None:
    done = bench.run("plan", big.name, "--ram", "1GB", "--json").succeeded()
    plan = plan_of(done)
    more = {name: done.json[name] for name in ("wear", "data")}
    assert done.out == json.dumps({**json.loads(plan.to_json()), **more}, indent=2) + "\n"
    assert plan.predicted is not None
    assert plan.predicted.peak_ram_bytes <= plan.budget_bytes == 1_000_000_000
    assert {phase.phase for phase in plan.predicted.phases} >= {
        "load",
        "step",
        "commit",
        "evaluation",
        "export",
    }
    assert all(phase.ram_bytes == sum(phase.parts.values()) for phase in plan.predicted.phases)
    assert max(phase.ram_bytes for phase in plan.predicted.phases) <= plan.predicted.peak_ram_bytes


def test_threads_are_those_that_the_variable_leaves(bench: Bench) -> None:
    job = bench.job("variable", hardware__threads="auto")
    found = bench.run("plan", job.name, "--json", OMP_NUM_THREADS="1").succeeded().json
    assert found["numerics"]["threads"] == 1


def test_output_writes_the_same_plan_beside_the_text(bench: Bench, big: Path) -> None:
    words = ("plan", big.name, "--ram", "1GB", "--output", "plan.json")
    assert bench.run(*words).succeeded().out.startswith("plan for 1 GB of RAM\n")
    assert (bench.folder / "plan.json").exists()
    found = plan_of(bench.run(*words, "--json").succeeded())
    assert Plan.parse_json((bench.folder / "plan.json").read_text(), "plan.json") == found


def test_planning_leaves_nothing_behind(bench: Bench, big: Path) -> None:
    before = sorted(bench.folder.iterdir())
    bench.run("plan", big.name, "--ram", "1GB").succeeded()
    assert sorted(bench.folder.iterdir()) == before


def test_less_memory_is_never_faster_and_its_cost_is_told(bench: Bench, big: Path) -> None:
    seconds = []
    for ram in ("4GB", "1GB", "700MB"):
        done = bench.run("plan", big.name, "--ram", ram, "--json").succeeded()
        seconds.append(plan_of(done).predicted.step_seconds)  # type: ignore[union-attr]
    assert seconds == sorted(seconds)
    text = bench.run("plan", big.name, "--ram", "700MB").succeeded().out
    given_up = text.split("given up for the budget\n")[1].split("\nalso fits")[0]
    assert "this plan" in given_up
    cost = re.search(r"cost: .* per step instead of .* \(\+(\d+)%\); --ram (\S+) would have room", given_up)
    assert cost is not None
    # What would have room has: nothing is given up there.
    free = bench.run("plan", big.name, "--ram", cost[2]).succeeded().out
    assert "given up for the budget\n  nothing" in free
    slower = seconds[-1] / seconds[0] - 1
    assert int(cost[1]) == pytest.approx(100 * slower, abs=1.5)


@pytest.mark.parametrize("missing", (20, 200))
def test_a_plan_that_does_not_fit_offers_three_ways_out_that_all_work(
    bench: Bench, big: Path, missing: int
) -> None:
    """Far from fitting, changes are named together with the smaller `--ram` that they leave."""
    words = ("plan", big.name, "--micro-batch-size", "4")
    needed = re.search(r"at least (\d+) MB", bench.run(*words, "--ram", "500MB").refused(3))
    assert needed is not None
    ram = f"{int(needed[1]) - missing}MB"
    message = bench.run(*words, "--ram", ram).refused(3)
    ways = message.split("these would fit: ")[1].strip().split("; ")
    assert len(ways) == 3, message
    for way in ways:
        found = re.fullmatch(r"((?:--\S+ \S+ )+)\(.* per step\)", way)
        assert found is not None, way
        flags = found[1].split()
        assert len(set(flags[::2])) == len(flags[::2]), way
        assert bench.run(*words, "--ram", ram, *flags).code == 0, way


def test_where_a_vocabulary_is_what_is_too_large_cutting_it_is_a_way_out(bench: Bench) -> None:
    """Once the data is there its tokens are known; the command that is named makes what is named."""
    first = bench.job("wide_seed", train__max_steps=1)
    bench.run("train", first.name).succeeded()
    wide = bench.folder / "wide"
    bench.run("export", "wide_seed", "wide", "--dtype", "float32").succeeded()
    widen(wide, 200_000)
    job = bench.job("wide_job", model__path="wide", model__init="pretrained", hardware__threads=1)
    message = bench.run("train", job.name, "--ram", "450MB").refused(3)
    ways, command = re.fullmatch(
        r"(?s).*these would fit: (.*)\. The model of `--model wide-pruned` has [\d,]+ of [\d,]+ tokens; "
        r"make it with `packmule (.*)`\s*",
        message,
    ).groups()  # type: ignore[union-attr]
    assert len(ways.split("; ")) >= 2, message
    bench.run(*shlex.split(command)).succeeded()
    way = next(way for way in ways.split("; ") if "wide-pruned" in way)
    flags = shlex.split(way.split(" (")[0])
    bench.run("train", job.name, *flags, "--max-steps", "1", "--output-dir", "wide_run").succeeded()


def widen(folder: Path, vocab: int) -> None:
    """Give a model rows for tokens that its tokenizer does not have."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    old = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = np.zeros((vocab, old.shape[1]), old.dtype)
    tensors["model.embed_tokens.weight"][: len(old)] = old
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab}))


def test_a_job_can_be_flags_alone(bench: Bench) -> None:
    done = bench.run(
        "plan", "--model", "model", "--max-seq-length", "32", "--ram", "900MB", "--threads", "1", "--json"
    ).succeeded()
    assert plan_of(done).numerics.rows == 8


def test_the_plan_shows_what_the_data_is_and_an_example(bench: Bench, big: Path) -> None:
    text = (bench.folder / "text.jsonl").read_text().splitlines()[0]
    first = json.loads(text)["text"]
    found = bench.run("plan", big.name, "--ram", "1GB", "--json").succeeded().json["data"]
    [source] = found
    [held] = source["held"]["formats"]
    assert (source["path"], held["format"], held["columns"]) == ("text.jsonl", "text", ["text"])
    assert held["example"] == [{"text": first + "<end>", "loss": True}]
    shown = bench.run("plan", big.name, "--ram", "1GB").succeeded().out
    assert "text.jsonl  text (text)" in shown
    assert f"example: text.jsonl as text\n  loss  {first[:50]}" in shown


def test_a_plan_without_data_says_why_there_is_no_example(bench: Bench, big: Path) -> None:
    for words, why in (
        (("--data", "nowhere.jsonl"), "dataset 'nowhere.jsonl': no such file"),
        (("--data", "model/config.json"), "columns of no known format"),
    ):
        done = bench.run("plan", big.name, "--ram", "1GB", *words).succeeded()
        assert "data\n  not read  " in done.out and why in done.out
        assert why in bench.run("plan", big.name, "--ram", "1GB", *words, "--json").json["data"]


def test_a_plan_says_what_the_run_writes_and_what_a_larger_batch_would(bench: Bench, big: Path) -> None:
    words = ("plan", big.name, "--ram", "1GB", "--hardware.state", "disk", "--tbw", "50TB")
    found = bench.run(*words, "--json").succeeded().json
    wear, written = found["wear"], found["predicted"]["disk_bytes_written_per_step"]
    assert wear["run_bytes"] == 100 * written and wear["doubled_bytes"] < wear["run_bytes"]
    assert wear["endurance_bytes"] == 50 * 10**12 and not wear["assumed"]
    text = bench.run(*words).succeeded().out
    said = re.search(r"wear +([\d.]+ GB) written in the run, ([\d.]+) % of the disk's rated 50 TB\n", text)
    assert said is not None, text
    assert format_bytes(wear["run_bytes"]) == said[1]
    assert float(said[2]) == pytest.approx(100 * wear["run_bytes"] / 50e12, rel=0.02)
    assert "for the same tokens in steps of twice as many rows" in text


def test_a_run_that_wears_the_disk_out_asks_first(bench: Bench) -> None:
    job = bench.job("worn", train__max_steps=2)
    words = ("train", job.name, "--hardware.state", "disk", "--tbw", "10kB")
    message = bench.run(*words).refused()
    assert re.match(
        r"error: The run would write [\d.]+ [kM]B to the disk of .*worn, [\d,]+ % of the 10 kB that it is "
        r"rated for\.\nhint: --yes runs it all the same; .*--disk names another disk\n$",
        message,
    ), message
    assert not (bench.folder / "worn" / "HEAD.json").exists()
    bench.run(*words, "--yes").succeeded()
