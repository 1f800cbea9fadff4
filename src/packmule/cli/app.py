"""The typer application: which commands there are. One file per command."""

from __future__ import annotations

from typing import Annotated

import typer

from packmule import __version__
from packmule.cli.eval import evaluate
from packmule.cli.export import export
from packmule.cli.generate import generate
from packmule.cli.info import info
from packmule.cli.plan import plan
from packmule.cli.probe import probe
from packmule.cli.train import train
from packmule.cli.verify import verify

# Plain help: rich alone would take a third of the time `--help` may take.
app = typer.Typer(
    name="packmule", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"packmule {__version__}")
        raise typer.Exit


@app.callback()
def packmule(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also after a command).")] = False,
) -> None:
    """Fit large-model training into the hardware you have.

    \b
    packmule probe                            measure this machine
    packmule plan  job.yaml --ram 4GB         how does it fit, how fast, why
    packmule train job.yaml --ram 4GB         run the plan; resume with the same line

    \b
    Exit codes: 0 done, 1 bug, 2 bad input, 3 does not fit, 4 disk (full, damaged, read-only),
    5 failed or out of time but resumable, 130/143 stopped by a signal with the last commit kept.
    """


_ANY_KEY = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(name="probe")(probe)
app.command(name="plan", context_settings=_ANY_KEY)(plan)
app.command(name="train", context_settings=_ANY_KEY)(train)
app.command(name="eval")(evaluate)
app.command(name="generate")(generate)
app.command(name="export")(export)
app.command(name="verify")(verify)
app.command(name="info")(info)
