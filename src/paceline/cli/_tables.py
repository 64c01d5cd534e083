"""A report's table on a terminal: the same words and figures as in the documents, whole at 80 columns.

Heads give way first, between words; then the first column, which names the row; a figure is never broken.
"""

from __future__ import annotations

import textwrap

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from paceline.measure.table import Table

NAME = 14  # characters that the first column keeps where it has them: it may wrap, but never vanish
HEAD = 8  # a head is not broken below this width


def drawn(table: Table) -> RichTable:
    """A table for the terminal."""
    rich = RichTable(
        title=table.title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD,
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    for place, head in enumerate(table.heads):
        cells = [row[place] for row in table.rows]
        rich.add_column(
            _wrapped(head, cells=cells),
            justify="left" if place == 0 else "right",
            no_wrap=place > 0,
            overflow="fold",
            min_width=min(NAME, max(map(len, cells), default=0)) if place == 0 else None,
        )
    for row in table.rows:
        rich.add_row(*row)
    return rich


def _wrapped(head: str, *, cells: list[str]) -> str:
    """A head no wider than its column's figures, as far as whole words allow."""
    width = max(HEAD, *(len(word) for word in [*head.split(), *cells]))
    return textwrap.fill(head, width=width, break_long_words=False, break_on_hyphens=False)
