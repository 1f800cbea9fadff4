"""The command line: parse, call, print. `main` is the console script.

Nothing heavy is imported here or by `packmule COMMAND --help`: commands import what they call.
"""

from __future__ import annotations

from packmule.cli.entry import main

__all__ = ["main"]
