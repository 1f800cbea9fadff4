"""What commands share: reading the job, printing JSON, rows and progress. Imports stay light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packmule.cli.job_flags import JobWords
from packmule.errors import ConfigError
from packmule.spec.environment import Environment

if TYPE_CHECKING:
    from packmule.spec.job import Job

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, nothing else.")]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The output folder of a run, or a checkpoint-N in it.")
]


def environment_of(context: typer.Context) -> Environment:
    """The record `main` passed in."""
    environment = context.obj
    if not isinstance(environment, Environment):
        raise TypeError("commands run through packmule.cli.main")
    return environment


def read_job(words: JobWords, environment: Environment) -> Job:
    """The job of a command line: file, then variables, then flags. Notes go to standard error.

    Raises:
        ConfigError: the file cannot be read, or the job is wrong.
    """
    from packmule.spec.job import read_job as parse_job

    text = "" if words.path is None else _read(Path(words.path))
    job, notes = parse_job(
        text, words.path or "the command line", overrides=words.overrides, variables=environment.variables
    )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return job


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(found.name for found in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f"there is {', '.join(near[:5])}" if near else "check the path"
        raise ConfigError(f"{path} does not exist.", hint) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder.", "give a job file, or the model with --model") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}.", "give a YAML file") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.", "check the path and its rights"
        ) from None


def print_json(data: Any) -> None:
    """One JSON document on standard output; infinities and NaN become null."""
    import json
    import math

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {str(key): plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return str(value) if isinstance(value, Path) else value

    print(json.dumps(plain(data), indent=2, ensure_ascii=False))


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Labels and values in two columns."""
    kept = list(rows)
    width = max((len(label) for label, _ in kept), default=0)
    for label, value in kept:
        print(f"{label:<{width}}  {value}".rstrip())


def progress_line() -> Callable[[str, float], None]:
    """A reporter of (what, fraction done): one line of standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return lambda doing, fraction: None

    def report(doing: str, fraction: float) -> None:
        end = "\r\x1b[K" if fraction >= 1 else ""
        print(f"\r\x1b[K{fraction:4.0%} {doing}{end}", end="", file=sys.stderr, flush=True)

    return report
