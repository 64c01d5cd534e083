"""A table of a report as text cells, figures with their errors, and the table as GitHub Markdown.

It knows no record and no colours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

PLUS_MINUS = "\u00b1"
Record = Mapping[str, Any]
_MARKED = re.compile(r"([\\`*_<>\[\]~])")  # what Markdown would take for its own


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column heads and rows of text.  The first column is text, the others are figures."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def pm(record: Record, name: str, *, digits: int = 2, factor: float = 1.0) -> str:
    """Value and error, the value alone where there is no error, `-` where there is no value."""
    value, error = record.get(name), record.get(f"{name}_se")
    if value is None:
        return "-"
    return f"{value * factor:.{digits}f}" + ("" if error is None else f" {PLUS_MINUS} {error * factor:.{digits}f}")


def markdown(table: Table) -> str:
    """A table as GitHub Markdown, its title in bold above it."""
    align = ["---", *["---:"] * (len(table.heads) - 1)]
    lines = [_line(table.heads), _line(align), *(_line(row) for row in table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines])


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: names of files, arms and plans are other people's; on one line."""
    return _MARKED.sub(r"\\\1", " ".join(text.split()))


def escaped_table(table: Table) -> Table:
    """The table with every cell escaped, for `markdown`."""
    rows = tuple(tuple(escaped(cell) for cell in row) for row in table.rows)
    return replace(table, title=escaped(table.title), heads=tuple(map(escaped, table.heads)), rows=rows)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
