"""What a user gets wrong, and what is then said: a cause, a way out, an exit code, no traceback."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from tests.cli.bench import Bench, Done


def model_with(bench: Bench, name: str, **changes: Any) -> str:
    """A copy of the model folder with other values in its config.json; None removes a key."""
    folder = bench.folder / name
    shutil.copytree(bench.folder / "model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return name


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("name", "changes", "cause"),
    [
        ("act", {"hidden_act": "gelu"}, "act/config.json: hidden_act 'gelu' is not supported."),
        ("bert", {"model_type": "bert"}, "bert/config.json: model_type 'bert' is not supported."),
        ("hidden", {"hidden_size": None}, "hidden/config.json: 'hidden_size' is missing."),
        (
            "rope",
            {"rope_scaling": {"rope_type": "spiral"}},
            "rope/config.json: rope_scaling: rope_type 'spiral' is not supported.",
        ),
        (
            "layers",
            {"num_hidden_layers": "two"},
            "layers/config.json: 'num_hidden_layers' is 'two', not a whole number of at least 1.",
        ),
        ("none", None, "model none does not exist."),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_a_folder_is_made(
    bench: Bench, command: str, name: str, changes: dict[str, Any] | None, cause: str
) -> None:
    if changes is not None:
        model_with(bench, name, **changes)
    job = bench.job(f"wrong_{command}_{name}", model__path=name)
    assert f"error: {cause}\n" in bench.run(command, job.name).refused()
    assert not (bench.folder / f"wrong_{command}_{name}").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_rows_longer_than_the_models_positions_are_refused(bench: Bench, command: str) -> None:
    job = bench.job("long_rows", train__max_seq_length=65)
    message = bench.run(command, job.name).refused()
    assert (
        "`train.max_seq_length` = 65 is more than the model's 64 positions.\nhint: use at most 64" in message
    )


def test_a_config_that_is_not_json_is_named(bench: Bench) -> None:
    name = model_with(bench, "broken")
    (bench.folder / name / "config.json").write_text("{")
    job = bench.job("broken_json", model__path=name)
    assert "broken/config.json is not JSON" in bench.run("train", job.name).refused()


def test_a_folder_without_weights_says_so(bench: Bench) -> None:
    job = bench.job("no_weights", model__init="pretrained")
    assert "model holds no model.safetensors" in bench.run("train", job.name).refused()


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("empty.txt", b"", "the dataset holds no text"),
        ("latin.txt", "caf\u00e9 au lait".encode("latin-1"), "latin.txt is not UTF-8"),
        ("keys.jsonl", b'{"text": "the mule"}\n{"txt": "x"}\n', 'line 2 has no "text" key'),
        ("lines.jsonl", b'{"text": "the mule"}\n{oops\n', "line 2 is not JSON"),
    ],
)
def test_text_that_cannot_be_read_is_named(bench: Bench, name: str, content: bytes, cause: str) -> None:
    (bench.folder / name).write_bytes(content)
    job = bench.job(f"text_{name.split('.')[0]}", data__path=name)
    message = bench.run("train", job.name).refused()
    assert cause in message
    assert name in message


def test_data_that_is_not_there_is_refused_before_a_folder_is_made(bench: Bench) -> None:
    job = bench.job("no_data", data__path="nothing.jsonl")
    assert "dataset 'nothing.jsonl'" in bench.run("train", job.name).refused()
    assert not (bench.folder / "no_data").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_budget_below_what_python_and_torch_take_does_not_fit(bench: Bench, command: str) -> None:
    job = bench.job(f"small_{command}", hardware__ram="200MB")
    message = bench.run(command, job.name).refused(3)
    assert "more than the budget of 200 MB" in message
    assert "Python and torch take" in message
    assert "these would fit: --ram " in message


def test_a_budget_beyond_the_machine_is_refused(bench: Bench) -> None:
    assert (
        "is more than this machine has"
        in bench.run("plan", bench.job("big").name, "--ram", "900TB").refused()
    )


def test_on_backward_with_clipping_is_refused_with_both_ways_out(bench: Bench) -> None:
    message = bench.run("plan", bench.job("clip").name, "--update", "on-backward").refused()
    assert "`optim.max_grad_norm` = 1" in message
    assert "--update on-fetch" in message
    assert "--max-grad-norm 0" in message
    assert bench.run("plan", "clip.yaml", "--update", "on-backward", "--max-grad-norm", "0").code == 0
    assert bench.run("plan", "clip.yaml", "--update", "on-fetch").code == 0


def test_an_output_folder_that_cannot_be_made_is_a_disk_error(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    message = bench.run("train", bench.job("blocked").name, "--output-dir", "file/run").refused(4)
    assert "file/run cannot be written" in message


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "nowhere"),
        ("verify", "model"),
        ("generate", "nowhere", "--prompt", "x"),
        ("export", "nowhere", "out"),
        ("info", "nowhere"),
        ("info", "text.jsonl"),
    ],
)
def test_a_path_that_is_no_run_is_named(bench: Bench, words: tuple[str, ...]) -> None:
    message = bench.run(*words).refused()
    assert words[1] in message


def test_generating_nothing_or_too_much_is_refused(trained: Done, bench: Bench) -> None:
    assert "`--prompt` is empty" in bench.run("generate", "run", "--prompt", "").refused()
    message = bench.run("generate", "run", "--prompt", "the mule " * 60).refused()
    assert "the model has room for 64." in message


def test_evaluating_without_held_out_text_is_refused(bench: Bench) -> None:
    bench.job("no_held_out", train__max_steps=1, data__val_size=0)
    bench.run("train", "no_held_out.yaml").succeeded()
    assert "give text with --dataset" in bench.run("eval", "no_held_out").refused()


def test_a_budget_too_small_for_generating_says_what_is_enough(trained: Done, bench: Bench) -> None:
    message = bench.run("generate", "run", "--prompt", "the mule", "--ram", "100MB").refused(3)
    enough = message.split("--ram ")[1].split(" ")[0]
    bench.run("generate", "run", "--prompt", "the mule", "--tokens", "3", "--ram", enough).succeeded()
