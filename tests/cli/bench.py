"""A folder with a tiny model, texts and a probe record, and the command line run in it as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.cli.tiny import texts, write_model, write_probe

MAIN = "import sys; from packmule.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str

    @cached_property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def named(self, event: str) -> list[dict[str, Any]]:
        """The events of one name."""
        return [found for found in self.events if found["event"] == event]

    def __str__(self) -> str:
        return f"packmule {' '.join(self.words)}: exit {self.code}\n{self.out}\n{self.err}"

    def succeeded(self) -> Done:
        """Itself, or a failed assertion that shows what was printed."""
        assert self.code == 0, str(self)
        return self

    def refused(self, code: int = 2) -> str:
        """Standard error of a refusal: a cause and a hint, no traceback, nothing on standard output."""
        assert self.code == code, str(self)
        lines = self.err.splitlines()
        assert sum(line.startswith("error: ") for line in lines) == 1, str(self)
        assert sum(line.startswith("hint: ") for line in lines) == 1, str(self)
        assert "Traceback" not in self.err, str(self)
        return self.err


@dataclass(frozen=True)
class Bench:
    """Where commands run.

    Attributes:
        folder: holds model/, text.jsonl and cache/; the commands' working directory.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path, seed: int) -> Bench:
        """Write what jobs need.

        Args:
            seed: of the texts.
        """
        write_model(folder / "model")
        bench = cls(folder)
        bench.write_texts("text.jsonl", texts(seed))
        write_probe(folder / "cache", folder)
        return bench

    def write_texts(self, name: str, documents: list[str]) -> Path:
        """A .jsonl file."""
        path = self.folder / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return path

    def job(self, name: str, **changes: Any) -> Path:
        """A job file NAME.yaml whose run is the folder NAME; `section__key=value` changes it."""
        job: dict[str, dict[str, Any]] = {
            "model": {"path": "model", "init": "random"},
            "data": {"path": "text.jsonl", "val_size": 0.1},
            "train": {
                "output_dir": name, "max_seq_length": 32, "global_batch_size": 4, "max_steps": 4,
                "precision": "fp32", "eval_rows": 6,
            },
            "optim": {"learning_rate": 1e-2, "warmup_steps": 1},
            "hardware": {"ram": "900MB", "threads": 1},
        }  # fmt: skip
        for key, value in changes.items():
            section, field = key.split("__")
            job.setdefault(section, {})[field] = value
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(job))  # JSON is YAML
        return path

    def run(self, *words: str | Path, timeout: float = 240, **variables: str) -> Done:
        """Run `packmule words...` to its end."""
        given = tuple(map(str, words))
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *given],
            cwd=self.folder,
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(given, done.returncode, done.stdout, done.stderr)

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a command: no PACKMULE_ variables but the cache, and `more`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PACKMULE_")}
        return {**kept, "PACKMULE_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1", **more}
