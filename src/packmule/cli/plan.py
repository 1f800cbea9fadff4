"""`packmule plan`: how the job fits, how fast it runs, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from packmule.cli.common import JsonFlag, environment_of, read_job
from packmule.cli.job_flags import JobWords, job_command


@job_command
def plan(
    context: typer.Context,
    words: JobWords,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Also write the plan as JSON.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Say how a job fits, how fast it will run, and why.

    Nothing is trained. Exit code 3, and what would fit, when it does not.

    \b
    packmule plan job.yaml --ram 4GB
    packmule plan --model ./model --dataset text.txt --max-steps 100 --ram 2.2GB --json
    packmule plan job.yaml --optim.lr 1e-4 --hardware.state disk
    """
    environment = environment_of(context)
    job = read_job(words, environment)
    from packmule.plan.table import plain
    from packmule.train.planning import make_plan
    from packmule.train.show import progress_line
    from packmule.train.tables import print_tables, terminal

    planned = make_plan(job, environment, progress=progress_line())
    if output is not None:
        planned.write(output)
    if json:
        print(planned.shown_json(), end="")
        return 0
    console = terminal(environment.no_color)
    if console is None:
        print(plain(planned.tables()), end="")
    else:
        print_tables(console, planned.tables())
    return 0
