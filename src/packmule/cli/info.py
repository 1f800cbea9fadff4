"""`packmule info`: what a run, a checkpoint or a model is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from packmule.cli.common import JsonFlag, environment_of, print_json, print_rows


def info(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run, a checkpoint, a model folder or a .gguf file.")
    ],
    json: JsonFlag = False,
) -> int:
    """Say what a run, checkpoint or model is.

    Architecture, step, precision, losses; no weights are loaded.

    \b
    packmule info out
    packmule info model.gguf --json
    """
    from packmule.train.commands import info as read_info

    result = read_info(path, environment_of(context))
    if json:
        print_json(result)
    else:
        print_rows((key, _text(value)) for key, value in result.items())
    return 0


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{_text(inner)} at {key}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_text(inner) for inner in value)
    return str(value)
