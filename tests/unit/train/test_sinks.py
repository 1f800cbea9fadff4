"""Sinks get each metric once, in order, over any number of starts, and can do a run no harm."""

from __future__ import annotations

import json
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from packmule.errors import ConfigError
from packmule.spec.job import Job
from packmule.train import sinks
from packmule.train.folder import RunFolder
from packmule.train.sinks import Sinks, import_sinks

JOB = Job.parse({"model": {"path": "m"}, "logging": {"run_name": "one"}}, "job")


class Wandb(types.ModuleType):
    """What of W&B is used, keeping what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.given: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **given: Any) -> Wandb:
        self.started.append(given)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.given.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def folder(path: Path) -> RunFolder:
    return RunFolder(path, path)


def write(path: Path, *entries: dict[str, Any]) -> None:
    with (path / "log.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def step(number: int) -> dict[str, Any]:
    return {"step": number, "train/loss": float(number), "tokens": 9, "rows": [1, 2]}


def test_metrics_arrive_once_over_two_starts_of_one_run(tmp_path: Path) -> None:
    module, warnings = Wandb(), list[str]()
    with Sinks({"wandb": module}, JOB, folder(tmp_path), warnings.append) as found:
        write(tmp_path, {"step": 0, "eval/loss": 5.0}, step(1))
        found.follow()
        write(tmp_path, step(2))
    # A resume from step 1 computes step 2 again and rewrites the log.
    (tmp_path / "log.jsonl").unlink()
    write(tmp_path, {"step": 0, "eval/loss": 5.0}, step(1))
    with Sinks({"wandb": module}, JOB, folder(tmp_path), warnings.append) as found:
        found.rewind()
        write(tmp_path, step(2), step(3), {"step": 3, "eval/loss": 4.0})
        found.follow()
    assert module.given == [
        (0, {"eval/loss": 5.0}), (1, {"train/loss": 1.0}), (2, {"train/loss": 2.0}),
        (3, {"train/loss": 3.0}), (3, {"eval/loss": 4.0}),
    ]  # fmt: skip
    first, second = module.started
    assert first["id"] == second["id"]
    assert (second["resume"], second["name"], module.finished) == ("allow", "one", 2)
    assert warnings == []


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    module = Wandb()
    with Sinks({"wandb": module}, JOB, folder(tmp_path), pytest.fail) as found:
        (tmp_path / "log.jsonl").write_text('{"step": 1, "train/lo')
        found.follow()
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('ss": 2.5}\nnot json\n')
    assert module.given == [(1, {"train/loss": 2.5})]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_sink_that_fails_is_told_once_and_others_go_on(tmp_path: Path, where: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SystemExit("no network\nmore")

    broken, good, warnings = Wandb(), Wandb(), list[str]()
    setattr(broken, where, fail)
    modules = {"wandb": broken, "trackio": good}
    with Sinks(modules, JOB, folder(tmp_path), warnings.append) as found:
        for number in range(1, 4):
            write(tmp_path, step(number))
            found.follow()
    assert [number for number, _ in good.given] == [1, 2, 3]
    assert warnings == ["wandb failed and gets no more metrics: no network. log.jsonl has them all."]


def test_a_sink_that_hangs_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, module, warnings = threading.Event(), Wandb(), list[str]()
    monkeypatch.setattr(module, "log", lambda values, step: released.wait(60))
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.1)
    write(tmp_path, step(1))
    with Sinks({"wandb": module}, JOB, folder(tmp_path), warnings.append) as found:
        found.follow()
    released.set()
    assert warnings == ["wandb has not taken all metrics."]


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sinks.MODULES, "trackio", "no_such_package_here")
    with pytest.raises(ConfigError) as caught:
        import_sinks(["trackio"])
    assert "`logging.report_to` = 'trackio' needs the package no_such_package_here" in caught.value.cause
    assert caught.value.hint.startswith("python -m pip install no_such_package_here")


def test_tensorboard_files_hold_what_the_log_holds(tmp_path: Path) -> None:
    """Read back by the record format: length, checksum, a protobuf event; no TensorBoard needed."""
    from tensorboardX.proto.event_pb2 import Event

    for steps in ((1, 2), (2, 3)):
        with Sinks(import_sinks(["tensorboard"]), JOB, folder(tmp_path), pytest.fail) as found:
            (tmp_path / "log.jsonl").write_text("")
            write(tmp_path, *map(step, steps))
            found.follow()
    values = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    assert sorted(values) == [(1, "train/loss", 1.0), (2, "train/loss", 2.0), (3, "train/loss", 3.0)]
