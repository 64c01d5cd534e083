"""Prompts to answer: from files of rows, or from a data set on the Hub through the optional package `datasets`.

This module knows no tokenizer and no target. Hub rows obey the same rules as file rows; nothing is fetched unless asked
for. A source is a path, or `hub:OWNER/NAME[?split=train&column=question&config=main]`; without `column`, rows must hold
messages, conversations, turns or prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from paceline.data.rows import Message, Reading, Row, Skip, parse_row, read_rows
from paceline.errors import ConfigError, DataError
from paceline.store.hub_rows import hub_rows

HUB = "hub:"
_HUB_KEYS = ("split", "column", "config", "revision")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a target is asked.

    messages: the system turn, if any, and the first user turn.  follow_ups: later user texts of the same conversation.
    category: of the row, or "".  source: "file:line" or "hub:name:row".
    """

    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...]
    category: str
    source: str


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Prompts of a source and the rows that gave none."""

    prompts: tuple[Prompt, ...]
    skips: tuple[Skip, ...]


def read_prompts(source: Path | str, *, limit: int | None = None) -> PromptReading:
    """The first `limit` prompts of a file or Hub source.

    Raises DataError when nothing is usable or the Hub cannot be reached, ConfigError when `datasets` is missing.
    """
    is_hub = isinstance(source, str) and source.startswith(HUB)
    reading = _read_hub(str(source), limit=limit) if is_hub else read_rows(source, limit=limit)
    return PromptReading(prompts=tuple(map(_prompt, reading.rows)), skips=reading.skips)


def _prompt(row: Row) -> Prompt:
    first = next(index for index, message in enumerate(row.messages) if message["role"] == "user")
    return Prompt(
        messages=row.messages[: first + 1], follow_ups=row.turns[1:], category=row.category, source=row.source
    )


def _read_hub(source: str, *, limit: int | None) -> Reading:
    name, _, query = source.removeprefix(HUB).partition("?")
    options = dict(parse_qsl(query))
    unknown = sorted(set(options) - set(_HUB_KEYS))
    if not name or unknown:
        raise ConfigError(
            f"cannot read {source!r}: unknown {', '.join(unknown) or 'name'}; expected hub:OWNER/NAME?split=..."
        )
    rows: list[Row] = []
    skips: list[Skip] = []
    for number, record in enumerate(
        hub_rows(
            name, split=options.get("split", "train"), config=options.get("config"), revision=options.get("revision")
        ),
        start=1,
    ):
        if limit is not None and len(rows) >= limit:
            break
        where = f"{HUB}{name}:{number}"
        try:
            rows.append(parse_row(_pick(record, options.get("column")), source=where))
        except DataError as error:
            skips.append(Skip(source=where, reason=str(error)))
    if not rows and limit != 0:
        first = f"; first: {skips[0].reason}" if skips else ""
        raise DataError(f"no usable row in {source}: {len(skips)} skipped{first}; name a text column with ?column=...")
    return Reading(rows=tuple(rows), skips=tuple(skips))


def _pick(record: dict[str, Any], column: str | None) -> dict[str, Any]:
    if column is None:
        return record
    if column not in record:
        raise DataError(f"no column {column}: found {', '.join(sorted(record)[:8])}")
    category = record.get("category")
    return {"turns": [record[column]], "category": category if isinstance(category, str) else ""}
