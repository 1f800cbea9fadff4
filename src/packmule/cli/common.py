"""What commands share: reading the job, printing JSON, rows and progress. Imports stay light."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packmule.cli.job_flags import JobWords
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
    from packmule.train.jobs import job_of

    return job_of(words.path, environment, words.overrides)


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
