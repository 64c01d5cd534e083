"""A report's table on a terminal: the same words and figures as in the documents."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from paceline.measure.report import Table


def drawn(table: Table) -> RichTable:
    """A table for the terminal."""
    rich = RichTable(title=table.title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
    for place, head in enumerate(table.heads):
        # The first column may wrap but never vanish: it names the row.
        rich.add_column(
            head,
            justify="left" if place == 0 else "right",
            no_wrap=place > 0,
            overflow="fold",
            min_width=14 if place == 0 else None,
        )
    for row in table.rows:
        rich.add_row(*row)
    return rich
