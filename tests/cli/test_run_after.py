"""The commands that look at a run: eval, generate, export, verify, info. A run is made once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.cli.bench import Bench, Done


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


# eval


def test_eval_repeats_what_training_logged(trained: Done, bench: Bench) -> None:
    logged = {entry["step"]: entry for entry in entries(bench.folder / "run") if "eval/loss" in entry}
    found = bench.run("eval", "run", "--rows", "6", "--json").succeeded().json
    assert found["loss"] == pytest.approx(logged[6]["eval/loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert (found["step"], found["rows"], found["targets"]) == (6, 6, logged[6]["eval/targets"])


def test_eval_of_a_snapshot_is_of_its_step(trained: Done, bench: Bench) -> None:
    run = bench.run("eval", "run", "--json").succeeded().json
    snapshot = bench.run("eval", "run/checkpoint-4", "--json").succeeded().json
    assert snapshot["step"] == 4
    assert snapshot["rows"] == run["rows"] > 6
    assert snapshot["loss"] != run["loss"]


def test_eval_on_other_text(trained: Done, bench: Bench) -> None:
    bench.write_texts("other.jsonl", ["the mule carries grain to the mill"] * 4)
    known = bench.run("eval", "run", "--dataset", "other.jsonl", "--json").succeeded().json
    bench.write_texts("strange.jsonl", ["9 Q# ~~ 7 %% zz 8 !!"] * 4)
    strange = bench.run("eval", "run", "--dataset", "strange.jsonl", "--json").succeeded().json
    assert known["loss"] < strange["loss"]
    assert not list((bench.folder / "run").glob("packmule-eval-*"))


def test_eval_text_shows_what_the_json_holds(trained: Done, bench: Bench) -> None:
    found = bench.run("eval", "run", "--rows", "3", "--json").succeeded().json
    text = bench.run("eval", "run", "--rows", "3").succeeded().out
    assert f"perplexity     {found['perplexity']:.3f}\n" in text
    assert "in 3 rows, after step 6" in text


# generate


def generated(bench: Bench, *words: str) -> str:
    done = bench.run("generate", "run", "--prompt", "the mule", "--json", *words).succeeded()
    assert done.json.keys() == {"prompt", "text"}
    return str(done.json["text"])


def test_greedy_generation_repeats_itself_and_the_samples_of_training(trained: Done, bench: Bench) -> None:
    text = generated(bench, "--tokens", "6")
    assert text == generated(bench, "--tokens", "6", "--seed", "5")
    samples = [entry["sample"] for entry in entries(bench.folder / "run") if "sample" in entry]
    assert text == samples[-1]
    plain = bench.run("generate", "run", "--prompt", "the mule", "--tokens", "6").succeeded()
    assert plain.out == text + "\n"


def test_sampling_repeats_with_its_seed_only(trained: Done, bench: Bench) -> None:
    words = ("--tokens", "20", "--temperature", "2.0")
    text = generated(bench, *words, "--seed", "3")
    assert text == generated(bench, *words, "--seed", "3")
    assert text != generated(bench, *words, "--seed", "4")
    assert generated(bench, *words, "--seed", "3", "--top-p", "0.001") == generated(bench, "--tokens", "20")


def test_no_more_tokens_come_than_were_asked_for(trained: Done, bench: Bench) -> None:
    from packmule.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.from_folder(bench.folder / "run" / "model")
    one = generated(bench, "--tokens", "1")
    three = generated(bench, "--tokens", "3")
    assert len(tokenizer.encode([one])[0]) == 1
    assert len(three) > len(one)
    assert three.startswith(one)


def test_texts_longer_than_a_row_go_on_to_the_models_last_position(trained: Done, bench: Bench) -> None:
    # Rows have 32 tokens, the model 64 positions.
    done = bench.run("generate", "run", "--prompt", "the mule", "--tokens", "200", "--temperature", "1.5")
    done.succeeded()


# export


def test_an_export_in_float32_gives_transformers_the_very_weights(trained: Done, bench: Bench) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    done = bench.run("export", "run", "exact", "--dtype", "float32", "--json").succeeded()
    size = (bench.folder / "exact" / "model.safetensors").stat().st_size
    assert (done.json["output"], done.json["dtype"]) == ("exact", "float32")
    assert 0 < size - done.json["weight_bytes"] < 4096
    oracle = transformers.AutoModelForCausalLM.from_pretrained(bench.folder / "exact", dtype=torch.float32)
    own = transformers.AutoModelForCausalLM.from_pretrained(
        bench.folder / "run" / "final", dtype=torch.float32
    )
    for (name, ours), (_, theirs) in zip(oracle.state_dict().items(), own.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name


def loss_by_transformers(bench: Bench, folder: str, text: str) -> float:
    """Mean loss per target of one document, as Packmule counts it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from packmule.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.from_folder(bench.folder / folder)
    ids = [*tokenizer.encode([text])[0], tokenizer.eos]
    model = transformers.AutoModelForCausalLM.from_pretrained(bench.folder / folder, dtype=torch.float32)
    batch = torch.tensor([ids])
    with torch.no_grad():
        return float(model(input_ids=batch, labels=batch).loss)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_an_export_computes_what_the_run_computes(
    trained: Done, bench: Bench, dtype: str, tolerance: float
) -> None:
    text = "the mule rests in shade and carries grain"
    name = f"export_{dtype}"
    bench.run("export", "run", name, "--dtype", dtype).succeeded()
    bench.write_texts("one.jsonl", [text])
    ours = bench.run("eval", "run", "--dataset", "one.jsonl", "--json").succeeded().json["loss"]
    assert loss_by_transformers(bench, name, text) == pytest.approx(ours, rel=tolerance)


def test_an_export_of_a_snapshot_differs_from_the_runs(trained: Done, bench: Bench) -> None:
    bench.run("export", "run/checkpoint-4", "early", "--dtype", "float32").succeeded()
    early = (bench.folder / "early" / "model.safetensors").read_bytes()
    late = (bench.folder / "run" / "final" / "model.safetensors").read_bytes()
    assert len(early) == len(late)
    assert early != late


def test_an_export_never_overwrites_and_offers_no_other_formats(trained: Done, bench: Bench) -> None:
    assert "exists already" in bench.run("export", "run", "model").refused()
    assert "use bfloat16, float16, float32" in bench.run("export", "run", "new", "--dtype", "int4").refused()
    assert "for .gguf files" in bench.run("export", "run", "new", "--dtype", "q8_0").refused()
    assert "without `--prune-vocab`" in bench.run("export", "run", "new", "--corpus", "text.jsonl").refused()
    assert not (bench.folder / "new").exists()


# verify and info


def test_verify_reads_run_and_snapshots(trained: Done, bench: Bench) -> None:
    found = bench.run("verify", "run", "--json").succeeded().json
    assert {name: entry["step"] for name, entry in found.items()} == {
        "run": 6, "checkpoint-4": 4, "checkpoint-6": 6,
    }  # fmt: skip
    sizes = {entry["checked_bytes"] for entry in found.values()}
    assert len(sizes) == 1
    text = bench.run("verify", "run").succeeded().out
    assert text.count("no damage") == 3


def test_verify_names_the_damage(bench: Bench) -> None:
    bench.job("damaged", train__max_steps=1)
    bench.run("train", "damaged.yaml").succeeded()
    state = bench.folder / "damaged" / "state.bin"
    head = json.loads((bench.folder / "damaged" / "HEAD.json").read_text())
    block = head["layout"]["blocks"][1]
    slot = head["blocks"][1]["slot"]
    with state.open("r+b") as file:
        file.seek(block["offset"] + slot * len(head["layout"]["planes"]) * block["plane_bytes"])
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    message = bench.run("verify", "damaged").refused(4)
    assert block["name"] in message
    assert "master" in message
    for words in (("export", "damaged", "from_damage"), ("eval", "damaged")):
        assert block["name"] in bench.run(*words).refused(4)
    assert not (bench.folder / "from_damage").exists()


def test_info_of_a_run_a_snapshot_and_a_model(trained: Done, bench: Bench) -> None:
    run = bench.run("info", "run", "--json").succeeded().json
    assert (run["kind"], run["step"], run["total steps"]) == ("run", 6, 6)
    assert run["snapshots"] == ["checkpoint-4", "checkpoint-6"]
    assert list(run["held-out perplexity"]) == ["step 0", "step 3", "step 6"]
    snapshot = bench.run("info", "run/checkpoint-4", "--json").succeeded().json
    assert (snapshot["kind"], snapshot["step"]) == ("snapshot", 4)
    assert list(snapshot["held-out perplexity"]) == ["step 0", "step 3"]
    model = bench.run("info", "model", "--json").succeeded().json
    assert (model["kind"], model["layers"]) == ("model", 2)
    assert model["parameters"] == run["parameters"] == snapshot["parameters"]
    text = bench.run("info", "run").succeeded().out
    assert f"{run['parameters']:,}" in text
