"""`packmule generate`: continue a text with a run's model."""

from __future__ import annotations

from typing import Annotated

import typer

from packmule.cli.common import JsonFlag, RunArgument, environment_of, print_json


def generate(
    context: typer.Context,
    run: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most new tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", min=0.0, max=1.0, help="Sample among the likeliest tokens of this share."),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampling.")] = 0,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Budget of all processes.")] = None,
    json: JsonFlag = False,
) -> int:
    """Continue a text with a run's model.

    \b
    packmule generate out --prompt "The struct module" --tokens 50
    packmule generate out/checkpoint-100 --prompt "Once" --temperature 0.8 --seed 3
    """
    from packmule.spec.units import parse_bytes
    from packmule.train.commands import generate as run_generation

    text = run_generation(
        run,
        environment_of(context),
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        ram_bytes=None if ram is None else parse_bytes(ram),
    )
    if json:
        print_json({"prompt": prompt, "text": text})
    else:
        print(text)
    return 0
