"""RunFolder: the names in a run's output folder, and its small records. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packmule.checkpoint.head import HEAD_NAME, Head, read_head
from packmule.errors import ConfigError, DiskError
from packmule.kernels import checksum
from packmule.shapes.model import ModelShape
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job, load_job
from packmule.spec.plan import Plan
from packmule.tiers.disk import PosixDisk, replace_file


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

    def read_plan(self) -> Plan:
        """The plan of the last start."""
        return Plan.parse_json(_text(self.plan), str(self.plan))

    def read_hardware(self) -> Hardware:
        """The machine of the last start."""
        return Hardware.parse_json(_text(self.probe), str(self.probe))

    def model_config(self) -> dict[str, Any]:
        """The model's config.json."""
        try:
            config = json.loads(_text(self.model / "config.json"))
        except ValueError as error:
            raise ConfigError(f"{self.model / 'config.json'} is not JSON: {error}.", "restore it") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{self.model / 'config.json'} is not a JSON object.", "restore it")
        return config

    def shape(self) -> ModelShape:
        """The model's architecture."""
        return ModelShape.from_config(self.model_config(), str(self.model / "config.json"))

    def write(self, path: Path, text: str) -> None:
        """Replace a small file, durably."""
        replace_file(PosixDisk(), path, text.encode())

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
    return load_job(_text(config), str(config))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "give the folder of a run") from None


class Log:
    """OUT/log.jsonl: one JSON object per line; a resumed run goes on in it, no step twice.

    Args:
        path: the file.
        step: entries of later steps are dropped (they were not committed).
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for entry, line in _entries(path) if entry.get("step", 0) <= step]
        replace_file(PosixDisk(), path, "".join(kept).encode())

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All entries of a log."""
    return [entry for entry, _ in _entries(path)]


def _entries(path: Path) -> Iterable[tuple[dict[str, Any], str]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a killed process
        if isinstance(entry, dict) and line.endswith("\n"):
            yield entry, line
