"""Bar: the part of a terminal that a run redraws: a phase with its bar, and a line of figures below."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


class Bar(Progress):
    """One phase at a time; fits 80 columns.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._below = ""
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[beside]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._now = self.add_task("start", total=None, beside="")

    def phase(self, name: str) -> None:
        """A new phase, of unknown length so far; its clock starts at zero."""
        self._below = ""
        self.reset(self._now, description=name, total=None, completed=0, beside="")

    def show(self, done: float, total: float, beside: str = "", below: str = "") -> None:
        """How far the phase is, with text beside and below the bar."""
        self._below = below
        self.update(self._now, completed=done, total=total, beside=beside)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the line below."""
        yield self.make_tasks_table(self.tasks)
        if self._below:
            yield Text("  " + self._below, no_wrap=True, overflow="ellipsis")
