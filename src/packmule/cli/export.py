"""`packmule export`: a run's weights as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packmule.cli.common import JsonFlag, RunArgument, environment_of, print_json


def export(
    context: typer.Context,
    run: RunArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="bfloat16 or float32.")] = "bfloat16",
    json: JsonFlag = False,
) -> int:
    """Write a run's weights for other tools.

    They are copied block by block and checksums are verified on the way; the output appears
    only when it is complete.

    \b
    packmule export out model
    packmule export out/checkpoint-100 model --dtype float32
    """
    from packmule.train.commands import export as run_export

    written = run_export(run, output, environment_of(context), dtype=dtype)
    if json:
        print_json({"output": written})
    else:
        print(f"wrote {written}")
    return 0
