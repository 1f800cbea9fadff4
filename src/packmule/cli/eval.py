"""`packmule eval`: the loss of a run or a checkpoint on text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from packmule.cli.common import JsonFlag, RunArgument, environment_of, print_json, print_rows

if TYPE_CHECKING:
    from packmule.train.results import Evaluation


def evaluate(
    context: typer.Context,
    run: RunArgument,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", metavar="PATH", help="Text to judge on. Default: the run's validation data."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="Which of the run's evaluation sets.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Judge on this many rows only.")] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import this module of your own, which the run was trained with.",
        ),
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Budget of all processes.")] = None,
    json: JsonFlag = False,
) -> int:
    """Loss and perplexity on held-out text.

    \b
    packmule eval out
    packmule eval out/checkpoint-100 --dataset other.txt --rows 64
    packmule eval vit-out --import vit
    """
    from packmule.spec.units import parse_bytes
    from packmule.train.commands import evaluate as run_evaluation

    result = run_evaluation(
        run,
        environment_of(context),
        dataset=tuple(dataset or ()),
        rows=rows,
        ram_bytes=None if ram is None else parse_bytes(ram),
        name=name,
        imports=tuple(imports or ()),
    )
    if json:
        print_json(result.model_dump())
    else:
        print_rows(_rows(result))
    return 0


def _rows(result: Evaluation) -> Iterator[tuple[str, str]]:
    yield "held-out loss", f"{result.loss:.4f}"
    text = result.perplexity is not None
    if text:
        yield "perplexity", f"{result.perplexity:.3f}"
        yield "bits per byte", "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    if text or result.accuracy is not None:
        yield "accuracy", "unknown" if result.accuracy is None else f"{result.accuracy:.2%}"
    for name, value in result.metrics.items():
        yield name, f"{value:.4f}"
    what, where = ("tokens", "rows") if text else ("targets", "samples")
    yield "on", f"{result.targets:,} {what} in {result.rows:,} {where}, after step {result.step}"
