"""RunFolder: the names in a run's output folder, and its small records. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packmule.checkpoint.head import HEAD_NAME, Head, read_head
from packmule.checkpoint.snapshots import newest
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.kernels import checksum
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape, Shape
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job, load_job
from packmule.spec.plan import Plan
from packmule.tiers.disk import Disk, PosixDisk, replace_file

HELD_OUT = "validation"
"""The evaluation set whose metrics go by no name: the run's held-out rows, or the one set of its own."""


@dataclass(frozen=True)
class RunFolder:
    """One run.

    Attributes:
        path: the output folder.
        state: where state.bin, HEAD.json, work.bin and snapshots lie; `path` unless the job says.
    """

    path: Path
    state: Path

    @classmethod
    def of(cls, job: Job) -> RunFolder:
        """The folder of a job, with absolute paths."""
        path = Path(job.train.output_dir).expanduser().absolute()
        disk = job.hardware.disk_path
        return cls(path, path if disk is None else Path(disk).expanduser().absolute())

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run, or the run of a snapshot folder given with `state` set to the snapshot.

        Raises:
            ConfigError: no run is there.
        """
        path = path.expanduser().absolute()
        if (path / "config.yaml").exists():
            disk = _read_job(path).hardware.disk_path
            return cls(path, path if disk is None else Path(disk).expanduser().absolute())
        if (path / HEAD_NAME).exists():
            parent = path.parent
            if (parent / "config.yaml").exists():
                return cls(parent, path)
        raise ConfigError(
            f"{path} is not a run: it has no config.yaml.",
            "give the output folder of `packmule train`, or a checkpoint-N in it",
        )

    @classmethod
    def at(cls, path: Path) -> RunFolder | None:
        """As `open`, but None where no run is: a model folder, a file, nothing."""
        path = path.expanduser().absolute()
        return cls.open(path) if any((path / name).exists() for name in ("config.yaml", HEAD_NAME)) else None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def probe(self) -> Path:
        return self.path / "probe.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def module(self) -> Path:
        return self.model / "module.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    def job(self) -> Job:
        """The resolved job."""
        return _read_job(self.path)

    def head(self) -> Head | None:
        """The last commit, or None."""
        return read_head(PosixDisk(), self.state, checksum())

    def newest_snapshot(self) -> Head | None:
        """The commit of the newest snapshot, or None."""
        disk, crc = PosixDisk(), checksum()
        path = newest(disk, self.state, crc)
        return None if path is None else read_head(disk, path, crc)

    def read_plan(self) -> Plan:
        """The plan of the last start."""
        return Plan.parse_json(read_text(self.plan), str(self.plan))

    def read_hardware(self) -> Hardware:
        """The machine of the last start."""
        return Hardware.parse_json(read_text(self.probe), str(self.probe))

    def model_config(self) -> dict[str, Any]:
        """The model's config.json."""
        try:
            config = json.loads(read_text(self.model / "config.json"))
        except ValueError as error:
            raise ConfigError(f"{self.model / 'config.json'} is not JSON: {error}.", "restore it") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{self.model / 'config.json'} is not a JSON object.", "restore it")
        return config

    def shape(self) -> Shape:
        """The model's architecture, or that of a user's modules."""
        modules = self.module_shape()
        return self.decoder_shape() if modules is None else modules

    def module_shape(self) -> ModuleShape | None:
        """A user's modules as they were measured; None where the model is a decoder."""
        if not self.module.exists():
            return None
        return ModuleShape.parse_json(read_text(self.module), str(self.module))

    def decoder_shape(self) -> ModelShape:
        """The architecture of a decoder.

        Raises:
            ConfigError: the model is made of a user's modules, which know no text.
        """
        modules = self.module_shape()
        if modules is not None:
            raise ConfigError(
                f"The model in {self.path} is made of modules of your own (`{modules.factory}`), which "
                "know no tokens.",
                "import them where you use them: `packmule export` writes their state dict",
            )
        return ModelShape.from_config(self.model_config(), str(self.model / "config.json"))

    def write(self, path: Path, text: str) -> None:
        """Replace a small file, durably."""
        replace_file(PosixDisk(), path, text.encode())

    def take_log(self, other: RunFolder, step: int) -> None:
        """Begin the log with another run's, up to a step, where there is none yet."""
        if not self.log.exists():
            kept = [line for entry, line in _entries(other.log)[0] if entry["step"] <= step]
            replace_file(PosixDisk(), self.log, b"".join(kept))

    def make(self) -> None:
        """Create the folders.

        Raises:
            DiskError: they cannot be made or written to.
        """
        for folder in (self.path, self.state):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / ".writable"
                probe.write_bytes(b"")
                probe.unlink()
            except OSError as error:
                raise DiskError(
                    f"{folder} cannot be written: {error.strerror}.", "choose another --output-dir or --disk"
                ) from None


def _read_job(path: Path) -> Job:
    config = path / "config.yaml"
    return load_job(read_text(config), str(config))


def read_text(path: Path) -> str:
    """A small file of a run.

    Raises:
        DamagedFile: it is not UTF-8.
        ConfigError: it is not there.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(
            f"{path} is damaged: {error.reason} at byte {error.start:,}.", "restore it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "give the folder of a run") from None


class Log:
    """OUT/log.jsonl: one JSON object per line; a resumed run goes on in it, no step twice.

    Args:
        path: the file.
        step: entries of later steps are dropped (they were not committed).
        disk: where it lies.

    Attributes:
        noise: the estimates (trace, square) of the gradient's noise that were there, in order.

    Raises:
        DiskError: it cannot be read or written.
    """

    def __init__(self, path: Path, step: int, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._step = step
        found, self._damaged = _entries(path)
        kept = [(entry, line) for entry, line in found if entry["step"] <= step]
        self._last = max((entry["step"] for entry, _ in kept if "train/loss" in entry), default=0)
        self._known = {(entry["step"], key) for entry, _ in kept for key in entry}
        self._evaluations = [entry for entry, _ in kept if _evaluates(entry)]
        self.noise = [
            (entry["train/noise_trace"], entry["train/noise_square"])
            for entry, _ in kept
            if "train/noise_trace" in entry
        ]
        replace_file(disk, path, b"".join(line for _, line in kept))

    def notes(self, every: int) -> list[str]:
        """What is wrong with the entries of committed steps, as sentences.

        Args:
            every: steps between two entries.
        """
        found = []
        if self._damaged:
            found.append(f"{self.path}: {self._damaged} damaged lines were dropped.")
        if self._last + every <= self._step:
            found.append(f"{self.path}: the entries of steps {self._last + 1} to {self._step} are lost.")
        return found

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Those with evaluations, in order, as they were written."""
        return self._evaluations

    def has(self, step: int, key: str) -> bool:
        """Whether an entry of a step has a key."""
        return (step, key) in self._known

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry.

        Raises:
            DiskError: the disk is full; a half-written line is dropped at resume.
        """
        line = (json.dumps(entry) + "\n").encode()
        self._disk.append_bytes(self.path, line)
        self._known |= {(entry["step"], key) for key in entry}
        if _evaluates(entry):
            self._evaluations.append(entry)

    def sync(self) -> None:
        """Make all entries durable."""
        self._disk.sync_file(self.path)


def _evaluates(entry: dict[str, Any]) -> bool:
    return any(key.startswith("eval/") for key in entry)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All entries of a log that can be read."""
    return [entry for entry, _ in _entries(path)[0]]


def perplexities(log: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, perplexity) of each evaluation, by the name of its set."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in log:
        for key, value in entry.items():
            if key.startswith("eval/") and key.endswith("perplexity"):
                name = key.removeprefix("eval/").removesuffix("perplexity").rstrip("/")
                found.setdefault(name or HELD_OUT, []).append((entry["step"], value))
    return found


def module_metrics(log: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each evaluation of modules of one's own, by the name of the metric."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in log:
        for key, value in entry.items():
            if key.startswith("eval/") and key != "eval/targets":
                found.setdefault(key.removeprefix("eval/"), []).append((entry["step"], value))
    return found


def _entries(path: Path) -> tuple[list[tuple[dict[str, Any], bytes]], int]:
    """(entry, line) for each whole line, and how many lines are none."""
    if not path.exists():
        return [], 0
    found, damaged = [], 0
    lines = PosixDisk().read_bytes(path).split(b"\n")
    # After the last line break comes nothing, or what a process that was killed had written.
    for line in lines[:-1]:
        entry = parse_entry(line)
        if entry is None:
            damaged += 1
        else:
            found.append((entry, line + b"\n"))
    return found, damaged


def parse_entry(line: bytes) -> dict[str, Any] | None:
    """The entry on a line of a log; None where a crash has left something else."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
