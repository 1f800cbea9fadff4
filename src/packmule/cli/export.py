"""`packmule export`: a run's or a model's weights as a Hugging Face folder or a .gguf file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packmule.cli.common import JsonFlag, environment_of, print_json


def export(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The output folder of a run, a checkpoint-N in it, or a model (folder or .gguf).",
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="A folder, or a file ending in .gguf; not there yet.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="bfloat16 (default of a folder), float16 (of a .gguf file), float32; q8_0 in .gguf files.",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Most weights in one file of a folder.")
    ] = "5GB",
    prune_vocab: Annotated[
        bool, typer.Option("--prune-vocab", help="Leave out tokens that the run's data does not use.")
    ] = False,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus", metavar="PATH", help="With --prune-vocab: this text instead; a model needs one."
        ),
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Write a run's or a model's weights for other tools.

    They are copied block by block and checksums are verified on the way; the output appears
    only when it is complete. Tokenizer and chat template go with them.

    \b
    packmule export out model
    packmule export out model.gguf --dtype q8_0
    packmule export out/checkpoint-100 model --prune-vocab --corpus texts/
    packmule export model.gguf folder
    """
    from packmule.spec.units import parse_bytes
    from packmule.train.export import export as run_export

    found = run_export(
        source,
        output,
        environment_of(context),
        dtype=dtype,
        shard_bytes=parse_bytes(shard_size),
        prune_vocab=prune_vocab,
        corpus=tuple(corpus or ()),
    )
    if json:
        print_json(found.model_dump(mode="json", exclude_none=True))
    else:
        print(found)
    return 0
