"""`packmule probe`: measure this machine, or show the kept measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packmule.cli.common import JsonFlag, environment_of, print_rows


def probe(
    context: typer.Context,
    disk: Annotated[
        Path, typer.Option("--disk", metavar="PATH", help="A folder on the disk a run will use.")
    ] = Path("."),
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="COUNT", help="CPU threads. Default: all usable.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The record's file. Default: in the cache."),
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Measure this machine: compute, memory, disk, limits.

    The result is kept and used by `plan` and `train`; it is a JSON file you may edit.

    \b
    packmule probe
    packmule probe --disk /mnt/nvme --refresh
    packmule probe --json > machine.json
    """
    from packmule.probe import asked_threads, explain, load
    from packmule.train.show import progress_line

    environment = environment_of(context)
    path = output if output is not None else environment.cache / "probe.json"
    count = asked_threads(threads, environment.omp_num_threads)
    hardware = load(path, disk, refresh=refresh, threads=count, progress=progress_line())
    if json:
        print(hardware.to_json(), end="")
        return 0
    print_rows([*explain(hardware), ("kept in", str(path))])
    return 0
