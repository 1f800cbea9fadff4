"""A fresh process that loads what the parent of a training run loads, and prints its peak memory.

Run as `python -m packmule.probe.parent_child`; prints {"peak_bytes": ...}. Loads no torch.
"""

from __future__ import annotations

import importlib
import io
import json

from packmule.probe.roots import peak_resident_bytes

_MODULES = (
    *("asyncio", "hashlib", "queue", "selectors", "signal", "subprocess", "tempfile", "threading"),
    *("numpy", "yaml", "typer", "rich.console", "rich.live", "rich.progress", "rich.table"),
    *("packmule.spec.hardware", "packmule.spec.plan", "packmule.spec.timeline", "packmule.spec.batch"),
)


def peak_bytes() -> int:
    """VmHWM in bytes after the imports and the first table drawn, which loads what rich delays."""
    for name in _MODULES:
        importlib.import_module(name)
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console = Console(file=io.StringIO(), force_terminal=True)
    table = Table("what", "value")
    table.add_row("a", "b")
    console.print(table)
    with Progress(console=console) as progress:
        progress.add_task("a", total=1)
    return peak_resident_bytes()


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": peak_bytes()}))
