"""Tables on a terminal, drawn by rich within its width; plain text elsewhere. No decisions about content."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from packmule.plan.table import Table

if TYPE_CHECKING:
    from rich.console import Console


def print_tables(console: Console, tables: list[Table]) -> None:
    """Each table under its title; a blank line between two."""
    for number, table in enumerate(tables):
        if number:
            console.print()
        if console.is_terminal:
            _draw(console, table)
        else:
            console.print(table.plain(), markup=False)


def _draw(console: Console, table: Table) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    if table.title:
        console.print(Text(table.title, style="bold"))
    if table.rows:
        gap = _gap(table, console.width)
        drawn = RichTable(
            box=None,
            show_header=bool(table.header),
            header_style="dim",
            pad_edge=False,
            padding=(0, gap, 0, 0),
        )
        drawn.add_column("", min_width=2 - gap)  # the indent
        names = table.header or ("",) * len(table.rows[0])
        for index, name in enumerate(names):
            figures = index in table.right
            first = index == 0
            drawn.add_column(
                name,
                justify="right" if figures else "left",
                no_wrap=figures or first,
                style="dim" if first and not figures else "",
                overflow="fold",
            )
        for row in table.rows:
            drawn.add_row("", *(Text(value) for value in row))
        console.print(drawn, soft_wrap=False)
    for note in table.notes:
        console.print(Text("\n".join(wrapped(note, console, "  "))))


def _gap(table: Table, width: int) -> int:
    """Columns of space between two columns: one where two would not fit and nothing can be wrapped."""
    columns = list(zip(*([table.header] if table.header else []), *table.rows, strict=True))
    needed = 1 + sum(2 + max(map(len, column)) for column in columns)
    figures = len(table.right) == len(columns) - 1
    return 1 if figures and needed > width else 2


def wrapped(text: str, console: Console, indent: str) -> list[str]:
    """A text's lines, each with the indent; cut between words at a terminal's edge."""
    lines = text.splitlines() or [""]
    if not console.is_terminal:
        return [indent + line for line in lines]
    width = max(20, console.width - len(indent))
    return [indent + part for line in lines for part in (textwrap.wrap(line, width) or [""])]


def terminal(no_color: bool) -> Console | None:
    """A console on standard output if that is a terminal."""
    import sys

    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console(no_color=no_color, highlight=False)
