"""Reading a job where its parts lie: a file or a mapping, variables, flags, arguments. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packmule.errors import ConfigError
from packmule.spec.environment import Environment
from packmule.spec.job import Job, read_job

JobLike = str | os.PathLike[str] | Mapping[str, Any] | Job | None
"""A job file's path, what such a file says, a job, or nothing (arguments or flags say it all)."""


def job_of(
    job: JobLike,
    environment: Environment,
    flags: Sequence[tuple[str, str]] = (),
    arguments: Mapping[str, Any] | None = None,
    nameless: str = "the command line",
) -> Job:
    """The job: file, then variables, then flags or arguments. Notes go to standard error.

    Args:
        flags: (key, text) of a command line.
        arguments: key or section -> value of a call.
        nameless: what to call the source where there is no file.

    Raises:
        ConfigError: the file cannot be read, or the job is wrong.
    """
    source = nameless
    if isinstance(job, Job):
        job = job.model_dump(mode="json")
    elif job is not None and not isinstance(job, Mapping):
        source, job = os.fspath(job), _read(Path(job).expanduser())
    given = {} if arguments is None else _plain(arguments)
    found, notes = read_job(
        "" if job is None else job if isinstance(job, str) else _plain(job),
        source,
        overrides=flags,
        variables=environment.variables,
        arguments=given,
    )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return found


def _plain(value: Any) -> Any:
    """What YAML could have given: paths become text, sequences lists, functions their names."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if callable(value):
        return _named(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _named(function: Any) -> str:
    """`module:function` of one that another process can import."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if not module or "<" in name:
        raise ConfigError(
            f"{function!r:.80} has no name by which the training process can import it.",
            "give a function that is defined at the top of a file",
        )
    if module == "__main__":
        raise ConfigError(
            f"`{name}` is defined in the script or notebook that is being run, which the training process "
            "cannot import.",
            "put it into a file beside it",
        )
    return f"{module}:{name}"


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
