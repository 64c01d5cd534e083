"""A table of text, and how a figure with its error is written in one.

It knows no record, no file and no colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLUS_MINUS = "\u00b1"
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column heads and rows of text.  The first column is text, the others are figures."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: Table) -> str:
    """A table as GitHub Markdown, its title in bold above it."""
    align = ["---", *["---:"] * (len(table.heads) - 1)]
    lines = [_line(table.heads), _line(align), *(_line(row) for row in table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines])


def plus_minus(record: Record, name: str, *, digits: int = 2, factor: float = 1.0) -> str:
    """Value and error, the value alone where there is no error, `-` where there is no value."""
    value, error = record.get(name), record.get(f"{name}_se")
    if value is None:
        return "-"
    return f"{value * factor:.{digits}f}" + ("" if error is None else f" {PLUS_MINUS} {error * factor:.{digits}f}")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
