"""The preparation child: what it writes, prints, reuses and refuses, without torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.prepare import main, open_data

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
    assert data.validation is not None
    assert report["documents"] == data.store.meta.documents == len(TEXTS)
    assert report["tokens"] == data.store.meta.tokens
    assert (report["train"]["documents"], report["validation"]["documents"]) == (len(TEXTS) - 1, 1)
    assert report["train"] == data.train.meta.model_dump(mode="json")
    assert report["train_fill_percent"] == pytest.approx(100 * data.train.meta.fill)
    names = {path.name for path in (out / "model").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == tokenizer | {"config.json", "generation_config.json", "weights.json"}
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
