"""`packmule verify`: read everything a run has on disk and compare checksums."""

from __future__ import annotations

import typer

from packmule.cli.common import JsonFlag, RunArgument, environment_of, print_json, print_rows


def verify(context: typer.Context, run: RunArgument, json: JsonFlag = False) -> int:
    """Check a run's files against their checksums.

    Every chunk of state and checkpoints is read. Exit code 4 names block, plane and chunk of
    the first damage.

    \b
    packmule verify out
    packmule verify out/checkpoint-100 --json
    """
    from packmule.spec.units import format_bytes
    from packmule.train.commands import verify as run_verification

    result = run_verification(run, environment_of(context))
    if json:
        print_json({name: found.model_dump() for name, found in result.items()})
    else:
        print_rows(
            (name, f"step {found.step}, {format_bytes(found.checked_bytes)} read, no damage")
            for name, found in result.items()
        )
    return 0
