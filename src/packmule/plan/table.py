"""Table: a title, columns and rows of text, and its plain form. Drawing on a terminal is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows under a title.

    Attributes:
        title: a line of its own; may be empty.
        rows: all of the same length.
        header: names of the columns; empty: none are needed.
        right: columns whose values are aligned to the right.
        notes: lines below.
    """

    title: str
    rows: tuple[Row, ...] = ()
    header: Row = ()
    right: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def plain(self) -> str:
        """Lines of text with aligned columns, two spaces apart."""
        lines = [self.title] if self.title else []
        rows = [*([self.header] if self.header else []), *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [
                value.rjust(width) if index in self.right else value.ljust(width)
                for index, (value, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def plain(tables: list[Table]) -> str:
    """Several tables as text, one after the other."""
    return "\n".join(table.plain() for table in tables) + "\n"
