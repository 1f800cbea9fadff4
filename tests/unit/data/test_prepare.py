"""The preparation child: what it writes, prints, reuses and refuses, without torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packmule.data.batches import Batches
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.prepare import main
from packmule.data.prepared import open_data
from packmule.data.preview import preview

TEXTS = ["the cat sat on the mat", "a mule carried 12 models", "once upon a time " * 30, "the end"]


@pytest.fixture
def request_of(tmp_path: Path, byte_level: Callable[..., Path]) -> dict[str, Any]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return {
        "model": str(byte_level("smollm")), "dataset": [str(data)], "max_seq_length": 16, "val_size": 1,
        "seed": 3, "out": str(tmp_path / "out"),
    }  # fmt: skip


def run(request: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    code = main([json.dumps(request)], io.StringIO(), out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines.pop() == {"event": "end"}
    return code, lines


def test_child_writes_model_and_data_and_reports_without_torch(request_of: dict[str, Any]) -> None:
    watch = (
        "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
        "runpy.run_module('packmule.data.prepare', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", watch], input=json.dumps(request_of), capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr.strip() == "False", done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines.pop() == {"event": "end"}
    phases = [line["phase"] for line in lines if "phase" in line]
    assert list(dict.fromkeys(phases)) == ["model", "hash", "tokenize", "pack"]
    report = lines[-1]["report"]
    out = Path(request_of["out"])
    data = open_data(out / "data")
    [held_out] = data.validation
    assert report["documents"] == data.store.meta.documents == len(TEXTS)
    assert report["tokens"] == data.store.meta.tokens
    assert (report["train"]["documents"], held_out.rows.meta.documents) == (len(TEXTS) - 1, 1)
    assert report["validation"] == [
        {"name": "validation", "rows": held_out.rows.meta.model_dump(mode="json")}
    ]
    assert report["train"] == data.train.meta.model_dump(mode="json")
    assert report["train_fill_percent"] == pytest.approx(100 * data.train.meta.fill)
    names = {path.name for path in (out / "model").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == tokenizer | {"config.json", "generation_config.json", "weights.json", "token_bytes.bin"}
    assert json.loads((out / "model" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_sample_prompt_is_encoded_as_a_document_begins(
    request_of: dict[str, Any], byte_level: Callable[..., Path]
) -> None:
    for add_bos in (False, True):
        model = byte_level("gpt-2", add_bos=add_bos)
        _, lines = run({**request_of, "model": str(model), "sample_prompt": "the cat"})
        tokenizer = tokenizer_from_gguf(model)
        expected = [tokenizer.bos] * add_bos + tokenizer.encode(["the cat"])[0]
        assert lines[-1]["report"]["sample_ids"] == expected


def test_store_is_reused_until_something_that_matters_changes(
    request_of: dict[str, Any], byte_level: Callable[..., Path]
) -> None:
    def reused(**changes: Any) -> bool:
        code, lines = run({**request_of, **changes})
        assert code == 0, lines
        return bool(lines[-1]["report"]["reused"])

    assert not reused()
    assert reused()
    assert reused(max_seq_length=8, val_size=0.5, seed=4)
    assert not reused(model=str(byte_level("gpt-2")))
    Path(request_of["dataset"][0]).write_text('{"text": "something else, and more"}\n' * 2)
    assert not reused()


def test_prepared_folder_serves_as_a_model(request_of: dict[str, Any], tmp_path: Path) -> None:
    assert run(request_of)[0] == 0
    folder = str(Path(request_of["out"]) / "model")
    code, lines = run({**request_of, "model": folder, "out": str(tmp_path / "again"), "random_init": True})
    assert code == 0, lines
    first = open_data(Path(request_of["out"]) / "data").store.meta.key
    assert open_data(tmp_path / "again" / "data").store.meta.key == first
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "again" / "model" / name).read_text() == (Path(folder) / name).read_text()


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"model": "nowhere.gguf"}, "DataError", "does not exist"),
    ({"dataset": ["nowhere.txt"]}, "DataError", "no such file"),
    ({"max_seq_len": 3}, "ConfigError", "max_seq_len"),
    ({"val_size": 50}, "ConfigError", "leaves none"),
    ({"out": "/proc/nowhere"}, "DiskError", "cannot write"),
])  # fmt: skip
def test_errors_are_one_json_line(
    changes: dict[str, Any], kind: str, message: str, request_of: dict[str, Any]
) -> None:
    code, lines = run({**request_of, **changes})
    error = lines[-1]
    assert (error["kind"], error["exit_code"]) == (kind, code) and code in (2, 4)
    assert message in error["cause"] and error["hint"]


def test_folder_without_weights_needs_random_init(request_of: dict[str, Any], tmp_path: Path) -> None:
    assert run(request_of)[0] == 0
    changes = {"model": str(Path(request_of["out"]) / "model"), "out": str(tmp_path / "again")}
    code, lines = run({**request_of, **changes})
    assert code == 2 and "model.safetensors" in lines[-1]["cause"]


def report_of(request: dict[str, Any]) -> dict[str, Any]:
    code, lines = run(request)
    assert code == 0, lines
    return dict(lines[-1]["report"])


def test_validation_sets_have_stores_of_their_own_and_names(
    request_of: dict[str, Any], tmp_path: Path
) -> None:
    sets = []
    for name, texts in (("code", ["def f(): pass", "x = 1"]), ("prose", ["the mule, the mill"])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sets.append({"name": name, "dataset": [str(path)]})
    report = report_of({**request_of, "validation": sets})
    data = open_data(Path(request_of["out"]) / "data")
    assert [found.name for found in data.validation] == ["code", "prose"]
    assert [found["name"] for found in report["validation"]] == ["code", "prose"]
    assert [found.rows.meta.documents for found in data.validation] == [2, 1]
    # nothing of the training data is held out beside them
    assert report["train"]["documents"] == len(TEXTS)
    [prose] = [found for found in data.validation if found.name == "prose"]
    tokenizer = tokenizer_from_gguf(Path(request_of["model"]))
    assert tokenizer.decode(prose.store.document(0)) == "the mule, the mill"


def test_a_mix_reports_its_sources(request_of: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("and now for something completely different " * 9)
    request = {**request_of, "dataset": [*request_of["dataset"], str(other)], "val_size": 0}
    report = report_of({**request, "weights": [0.75, 0.25]})
    assert [(group["weight"]) for group in report["train"]["groups"]] == [3, 1]
    assert [source["weight"] for source in report["sources"]] == [0.75, 0.25]
    assert [source["held"]["documents"] for source in report["sources"]] == [len(TEXTS), 1]
    assert [source["rows"] for source in report["sources"]] == [g["rows"] for g in report["train"]["groups"]]
    plain = report_of(request)
    assert plain["reused"] and plain["train"]["groups"] == []
    assert plain["train"]["tokens"] == report["train"]["tokens"]


def test_near_duplicates_are_left_out_on_request_and_listed(
    request_of: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, TEXTS[1].upper(), TEXTS[3]])
    )
    request = {**request_of, "dataset": [str(path)], "val_size": 0}
    assert report_of(request)["documents"] == len(TEXTS) + 2
    for _ in range(2):  # the second time from the store
        report = report_of({**request, "deduplicate": 0.8})
        assert report["documents"] == len(TEXTS)
        assert report["sources"][0]["held"]["duplicates"] == 2
        _, *lines = Path(report["duplicates"]).read_text().splitlines()
        assert [json.loads(line)["document"] for line in lines] == [4, 5]


def test_a_second_start_reads_neither_data_nor_tokens(
    request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a resume costs before its first step: the files are looked at, not read."""
    path = Path(request_of["dataset"][0])
    before = path.stat().st_mtime - 10
    os.utime(path, (before, before))
    first = report_of(request_of)

    def no_reading(*_: Any) -> None:
        raise AssertionError("data was read again")

    for name in ("prepare.write_store", "prepare.write_rows", "sources.hash_file"):
        monkeypatch.setattr(f"packmule.data.{name}", no_reading)
    again = report_of(request_of)
    assert again["reused"]
    for key in ("train", "validation", "sources", "tokens"):
        assert again[key] == first[key]
    # the same size and another time: it is read
    path.write_text(path.read_text().replace("mule", "male"))
    with pytest.raises(AssertionError, match="read again"):
        run(request_of)


def test_damaged_stores_and_rows_are_made_again(request_of: dict[str, Any]) -> None:
    report_of(request_of)
    folder = Path(request_of["out"]) / "data"
    kept = {path: path.read_bytes() for path in folder.rglob("*.bin")}
    for path, content in kept.items():
        path.write_bytes(content[:-1])
        report_of(request_of)
        assert path.read_bytes() == content, path.name


def test_old_stores_and_rows_are_still_read() -> None:
    frozen = Path(__file__).parents[2] / "frozen" / "train-v1" / "data"
    data = open_data(frozen)
    assert (data.store.meta.format, data.train.meta.format) == (1, 1)
    [held_out] = data.validation
    assert held_out.name == "validation" and held_out.store is data.store
    assert data.store.trained(0, 5) is None
    batches = Batches(data.store, data.train, 42)
    assert batches.targets(batches.row_ids(0, 4)) > 0


def test_a_template_of_the_job_goes_with_the_model_and_leaves_with_it(
    request_of: dict[str, Any], tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    request = {**request_of, "dataset": [str(chat)], "val_size": 0, "chat_template": str(template)}
    request["max_seq_length"] = 64
    report = report_of(request)
    [example] = [found["example"] for found in report["sources"][0]["held"]["formats"]]
    assert [part["text"] for part in example if part["loss"]] == [" sat on the mat\n<|im_end|>"]
    kept = Path(request_of["out"]) / "model" / "chat_template.jinja"
    assert kept.read_text() == template.read_text()
    report_of(request_of)
    assert not kept.exists()


def test_the_preview_shows_formats_and_writes_nothing(request_of: dict[str, Any], tmp_path: Path) -> None:
    out = io.StringIO()
    other = tmp_path / "b.csv"
    other.write_text("prompt,completion\nthe cat, sat\n")
    request = {**request_of, "dataset": [*request_of["dataset"], str(other)]}
    assert main([json.dumps(request)], io.StringIO(), out, preview) == 0
    report = json.loads(out.getvalue().splitlines()[-2])["report"]
    formats = [source["held"]["formats"][0] for source in report["sources"]]
    assert [found["format"] for found in formats] == ["text", "prompt-completion"]
    assert formats[0]["example"] == [{"text": TEXTS[0] + "<|im_end|>", "loss": True}]
    assert formats[1]["example"] == [
        {"text": "the cat", "loss": False},
        {"text": " sat<|im_end|>", "loss": True},
    ]
    assert not Path(request_of["out"]).exists()


def test_more_memory_than_allowed_is_one_error(request_of: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "the mule " * (9 << 20)}))
    request = {**request_of, "dataset": [str(path)], "ram_bytes": 256 << 20}
    done = subprocess.run(
        [sys.executable, "-m", "packmule.data.prepare", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    [error] = [line for line in map(json.loads, done.stdout.splitlines()) if line["event"] == "error"]
    assert "more memory than the budget leaves" in error["cause"]
