"""`packmule train`: plan the job and run it; the same line resumes it."""

from __future__ import annotations

from typing import Annotated

import typer

from packmule.cli.common import JsonFlag, environment_of, read_job
from packmule.cli.job_flags import JobWords, job_command


@job_command
def train(
    context: typer.Context,
    words: JobWords,
    renumber: Annotated[
        bool,
        typer.Option(
            "--renumber", help="Resume although the numerics (docs/design.md) differ from the run's."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Also write more than a tenth of the disk's rated life.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print results only, no progress.")] = False,
    json: JsonFlag = False,
) -> int:
    """Train within a memory budget; the same line resumes.

    \b
    packmule train job.yaml
    packmule train job.yaml --ram 2.2GB --max-steps 100 --optim.lr 1e-4
    packmule train --model model.gguf --dataset text.txt --output-dir out --epochs 0.5
    """
    environment = environment_of(context)
    job = read_job(words, environment)
    job.require_data()
    from packmule.train.launch import train as launch

    code: int = launch(job, environment, renumber=renumber, yes=yes, quiet=quiet, json_lines=json)
    return code
