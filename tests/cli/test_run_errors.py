"""What a user gets wrong, and what is then said: a cause, a way out, an exit code, no traceback."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.cli.bench import Bench, Done


def model_with(bench: Bench, name: str, **changes: Any) -> str:
    """A copy of the model folder with other values in its config.json; None removes a key."""
    folder = bench.folder / name
    shutil.copytree(bench.folder / "model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return name


def says(done: Done, code: int, cause: str, hint: str) -> None:
    """That a command refuses in these words; # stands for a figure that this machine decides."""
    done.refused(code)
    words = re.escape(f"error: {cause}\nhint: {hint}\n").replace(r"\#", r"[\d.]+")
    assert re.fullmatch(words, done.err), done.err


FAMILIES = "llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, phi3, gemma2, gemma3_text, gpt2"


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(("name", "changes", "cause", "hint"), [
    ("act", {"hidden_act": "gelu"}, "act/config.json: hidden_act 'gelu' is not supported.",
     "supported: silu, swish, gelu_pytorch_tanh, gelu_new"),
    ("bert", {"model_type": "bert"}, "bert/config.json: model_type 'bert' is not supported.",
     f"supported: {FAMILIES}"),
    ("hidden", {"hidden_size": None}, "hidden/config.json: 'hidden_size' is missing.",
     "use the model's full config.json"),
    ("rope", {"rope_scaling": {"rope_type": "spiral"}},
     "rope/config.json: rope_scaling: rope_type 'spiral' is not supported.",
     "supported: default, linear, dynamic, yarn, llama3, longrope"),
    ("layers", {"num_hidden_layers": "two"},
     "layers/config.json: 'num_hidden_layers' is 'two', not a whole number of at least 1.",
     "restore the model's own config.json"),
    ("none", None, "model none does not exist.", "give a Hugging Face folder or a .gguf file"),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_before_a_folder_is_made(
    bench: Bench, command: str, name: str, changes: dict[str, Any] | None, cause: str, hint: str
) -> None:
    if changes is not None:
        model_with(bench, name, **changes)
    job = bench.job(f"wrong_{command}_{name}", model__path=name)
    says(bench.run(command, job.name), 2, cause, hint)
    assert not (bench.folder / f"wrong_{command}_{name}").exists()


@pytest.mark.parametrize(("changes", "flags", "code", "cause", "hint"), [
    ({"train__max_stesp": 3}, (), 2, "{job}: unknown key `train.max_stesp`.",
     "did you mean `train.max_steps`?"),
    ({"train__learning-rate": 1}, (), 2, "{job}: unknown key `train.learning-rate`.",
     "it belongs in section `optim`: write `optim.learning_rate`"),
    ({}, ("--trian.max_steps", "3"), 2,
     "the command line (--trian.max_steps): unknown key `--trian.max_steps`.",
     "it belongs in section `train`: write `train.max_steps`"),
    ({}, ("--max_seq-length", "1e-4x"), 2,
     "the command line (--max_seq-length): `train.max_seq_length` = '1e-4x' is not a whole number.",
     "change `train.max_seq_length` in the command line (--max_seq-length)"),
    ({"optim__learning_rate": None}, (), 2, "{job}: `optim.learning_rate` = None is not a number.",
     "leave `optim.learning_rate` out, or give it a value"),
    ({"train__max_seq_length": 65}, (), 2,
     "`train.max_seq_length` = 65 is more than the model's 64 positions.", "use at most 64"),
    ({"hardware__ram": "200MB"}, (), 3,
     "The job needs at least # MB of RAM, # MB more than the budget of 200 MB "
     "(of which Python and torch take # MB).", "these would fit: --ram #MB (# ms per step)"),
    ({}, ("--ram", "900TB"), 2,
     "`hardware.ram` = 900 TB is more than this machine has (# GB, of which # GB are available).",
     "use at most # GB"),
])  # fmt: skip
def test_a_plan_that_cannot_be_made_is_refused_in_these_words(
    bench: Bench, changes: dict[str, Any], flags: tuple[str, ...], code: int, cause: str, hint: str
) -> None:
    job = bench.job("planned", **changes)
    for command in ("plan", "train") if code == 3 or "train__max_seq_length" in changes else ("plan",):
        says(bench.run(command, job.name, *flags), code, cause.format(job=job.name), hint)


@pytest.mark.parametrize(("name", "content", "cause", "hint"), [
    ("empty.txt", b"", "the dataset holds no text ({path}).", "check that the files are not empty"),
    ("masked.jsonl", b'{"input_ids": [5, 6], "labels": [-100, -100]}\n' * 3,
     "nothing in the dataset carries loss: all labels of 3 documents are -100 ({path}).",
     "give tokens that are to be learned their own id in `labels`, or leave `labels` out"),
    ("latin.txt", "caf\u00e9 au lait".encode("latin-1"), "{path} is not UTF-8: byte 3 cannot be decoded.",
     "convert it: iconv -f latin1 -t utf-8 latin.txt > fixed.txt"),
    ("keys.jsonl", b'{"text": "the mule"}\n{"txt": "x"}\n',
     "{path}: line 2 has no \"text\" key (keys: 'txt').",
     'a record of the format text is like {"text": "..."}'),
    ("lines.jsonl", b'{"text": "the mule"}\n{"text": oops\n',
     "{path}: line 2 is not JSON: Expecting value (column 10).", "write one JSON record per line"),
    ("long.jsonl", b'{"text": "' + b"the mule " * 90 + b'"}\n',
     "the data: all 1 documents are longer than a row of 32 tokens and are left out.",
     "raise train.max_seq_length, or use data.long_documents: split"),
    (None, b"", "dataset 'nothing.jsonl': no such file, folder or pattern.", "check the path"),
])  # fmt: skip
def test_data_that_cannot_be_used_is_refused_in_these_words(
    bench: Bench, name: str | None, content: bytes, cause: str, hint: str
) -> None:
    path = bench.folder / (name or "nothing.jsonl")
    if name is not None:
        path.write_bytes(content)
    run = f"data_{path.stem}"
    job = bench.job(run, data__path=path.name, data__long_documents="drop", data__val_size=0)
    says(bench.run("train", job.name), 2, cause.format(path=path), hint)
    assert name is not None or not (bench.folder / run).exists()


def one_row_less(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors[QUERY] = np.ascontiguousarray(tensors[QUERY][:16])
    save_file(tensors, folder / "model.safetensors")


def one_tensor_less(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    del tensors[QUERY]
    save_file(tensors, folder / "model.safetensors")


def one_shard_less(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in sorted(tensors)[number::3]}, folder / file)
    places = {name: files[number % 3] for number, name in enumerate(sorted(tensors))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    (folder / files[1]).unlink()


def no_weights(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    (folder / "tokenizer.json").unlink()


def fewer_embeddings(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 200}))


def half_a_config(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    (folder / "config.json").write_text("{")


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(("spoil", "cause", "hint"), [
    (one_row_less, "{path}/model.safetensors: tensor '" + QUERY + "' has shape [16, 32], but config.json "
     "asks for [32, 32].", "use the config.json the weights were saved with"),
    (one_tensor_less, "tensor '" + QUERY + "' is missing in {path}/model.safetensors.",
     "get the model again, or correct its config.json"),
    (one_shard_less, "{name}: 'model-00002-of-00003.safetensors' of 3 weight files is missing.",
     "get the files that model.safetensors.index.json names"),
    (no_weights, "{name} holds no model.safetensors and no model.safetensors.index.json.",
     "give a .gguf file itself, or save the model with `save_pretrained(folder)`"),
    (no_tokenizer, "{name} holds no tokenizer.json.",
     "save one: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"),
    (fewer_embeddings, "{name}: the tokenizer gives ids up to 299, but the model has 200 embeddings.",
     "use the tokenizer the model was trained with"),
    (half_a_config, "{name}/config.json is not JSON: Expecting property name enclosed in double quotes: "
     "line 1 column 2 (char 1).", "restore the file"),
])  # fmt: skip
def test_model_files_that_do_not_go_together_are_refused_in_these_words(
    trained: Done, bench: Bench, spoil: Callable[[Path, dict[str, np.ndarray]], None], cause: str, hint: str
) -> None:
    name = f"spoiled_{spoil.__name__}"
    path = bench.folder / name
    shutil.copytree(bench.folder / "run" / "final", path)
    spoil(path, load_file(path / "model.safetensors"))
    job = bench.job(f"with_{name}", model__path=name, model__init="pretrained")
    says(bench.run("train", job.name), 2, cause.format(path=path, name=name), hint)


def test_a_run_that_another_process_holds_is_refused_in_these_words(bench: Bench) -> None:
    job = bench.job("held")
    (bench.folder / "held").mkdir()
    with open(bench.folder / "held" / "lock", "w") as lock:
        lock.write("4242 stable")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        says(
            bench.run("train", job.name), 2, f"{bench.folder}/held is in use by process 4242 on stable.",
            "wait for it or stop it, or use another folder",
        )  # fmt: skip


def test_an_output_folder_that_cannot_be_made_is_a_disk_error(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    cause = f"{bench.folder}/file/run cannot be written: Not a directory."
    done = bench.run("train", bench.job("blocked").name, "--output-dir", "file/run")
    says(done, 4, cause, "choose another --output-dir or --disk")


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
