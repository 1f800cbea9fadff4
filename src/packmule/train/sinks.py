"""Sinks: the log's metrics, sent on to TensorBoard, W&B or trackio. No torch.

log.jsonl is what a run writes; a sink follows it from the parent, in a thread of its own, and can do
the run no harm: what fails is told once and left alone. `OUT/sinks.json` says how far each has come,
so a resumed run goes on in the same place and no step is sent twice.
"""

from __future__ import annotations

import importlib
import json
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from packmule.errors import ConfigError
from packmule.spec.job import Job
from packmule.train.folder import RunFolder, parse_entry

CLOSE_SECONDS = 20.0
"""How long the end of a run waits for its sinks."""

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Sink -> the package it needs, which is imported only when it is asked for."""

PROJECT = "packmule"


class Sink(Protocol):
    """Where metrics go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one step, by name."""

    def close(self) -> None:
        """All has been written."""


class _TensorBoard:
    def __init__(self, module: Any, job: Job, folder: RunFolder, mark: dict[str, Any]) -> None:
        # Files are named by the second: two starts within one must not share a file.
        suffix = f".{secrets.token_hex(4)}"
        self._writer = module.SummaryWriter(str(folder.path / "tensorboard"), filename_suffix=suffix)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, module: Any, job: Job, folder: RunFolder, mark: dict[str, Any]) -> None:
        mark.setdefault("id", secrets.token_hex(4))
        self._run = module.init(
            id=mark["id"],
            resume="allow",
            name=job.logging.run_name,
            dir=str(folder.path),
            config=job.model_dump(mode="json"),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, module: Any, job: Job, folder: RunFolder, mark: dict[str, Any]) -> None:
        name = job.logging.run_name or folder.path.name
        mark.setdefault("name", f"{name}-{secrets.token_hex(4)}")
        self._module = module
        module.init(project=PROJECT, name=mark["name"], resume="allow", config=job.model_dump(mode="json"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


_KINDS: dict[str, Callable[[Any, Job, RunFolder, dict[str, Any]], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


def import_sinks(names: Iterable[str]) -> dict[str, Any]:
    """The packages that sinks need, by sink. They take memory: call before a run is planned.

    Raises:
        ConfigError: one is not installed; names the command that installs it.
    """
    found = {}
    for name in names:
        try:
            found[name] = importlib.import_module(MODULES[name])
        except ImportError as error:
            raise ConfigError(
                f"`logging.report_to` = {name!r} needs the package {MODULES[name]}: {error}.",
                f"python -m pip install {MODULES[name]}, or leave {name} out: log.jsonl is always written",
            ) from None
    return found


class Sinks:
    """Follows a run's log and sends it on. Use as a context manager.

    Args:
        modules: of `import_sinks`.
        job, folder: of the run.
        warn: called once per sink that fails, from `follow` or at the end.
    """

    def __init__(
        self, modules: Mapping[str, Any], job: Job, folder: RunFolder, warn: Callable[[str], None]
    ) -> None:
        self._folder, self._warn = folder, warn
        self._marks_path = folder.path / "sinks.json"
        self._marks = _read_marks(self._marks_path)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._offset = 0
        self._queues: dict[str, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._threads = []
        for name, module in modules.items():
            self._queues[name] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(name, module, job), daemon=True, name=f"packmule-{name}"
            )
            self._threads.append(thread)
            thread.start()

    def follow(self) -> None:
        """Send on what the log has gained; also tell what failed meanwhile."""
        if self._queues:
            for entry in self._new_entries():
                for waiting in self._queues.values():
                    waiting.put(entry)
        while not self._failures.empty():
            self._warn(self._failures.get())

    def rewind(self) -> None:
        """The log has been rewritten: read it from its beginning."""
        self._offset = 0

    def close(self) -> None:
        """Wait, not for ever, until all has been sent."""
        self.follow()
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                self._failures.put(f"{thread.name.removeprefix('packmule-')} has not taken all metrics.")
        self.follow()

    def _new_entries(self) -> list[dict[str, Any]]:
        try:
            with self._folder.log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        entries = (parse_entry(line) for line in whole.split(b"\n"))
        return [entry for entry in entries if entry is not None]

    def _serve(self, name: str, module: Any, job: Job) -> None:
        """One sink's thread: whatever it raises ends it and nothing else."""
        mark = self._marks.setdefault(name, {})
        waiting = self._queues[name]
        try:
            sink = _KINDS[name](module, job, self._folder, mark)
            while (entry := waiting.get()) is not None:
                values = _values(entry, mark)
                if values:
                    sink.write(entry["step"], values)
                    mark |= {key.partition("/")[0]: entry["step"] for key in values}
                    if waiting.empty():
                        self._save()
            sink.close()
            self._save()
        except BaseException as error:  # some packages end in SystemExit
            what = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._failures.put(f"{name} failed and gets no more metrics: {what}. log.jsonl has them all.")

    def _save(self) -> None:
        with self._lock:
            temporary = self._marks_path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self._marks, indent=2) + "\n", encoding="utf-8")
            temporary.replace(self._marks_path)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _values(entry: Mapping[str, Any], mark: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an entry that the sink does not have."""
    return {
        key: value
        for key, value in entry.items()
        if "/" in key
        and isinstance(value, (int, float))
        and entry["step"] > mark.get(key.partition("/")[0], -1)
    }


def _read_marks(path: Path) -> dict[str, dict[str, Any]]:
    """How far each sink has come; nothing where the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(mark, dict) for mark in found.values())
    return found if whole else {}
