"""Prompts to answer: from files of rows, or from a data set on the Hub through the optional package `datasets`.

This module knows no tokenizer and no target. Hub rows obey the same rules as file rows; nothing is fetched unless asked
for. A source is a path, or `hub:OWNER/NAME[?split=train&column=question&config=main&revision=COMMIT]`; without
`column`, rows must hold messages, conversations, turns or prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from paceline.data.rows import SPELLINGS, Message, Row, Skip, iter_rows, no_usable_row, parse_row
from paceline.errors import ConfigError, DataError
from paceline.store.faults import fault_line
from paceline.store.hub_rows import hub_commit, hub_rows
from paceline.store.manifest import file_digests

HUB = "hub:"
_HUB_KEYS = ("split", "column", "config", "revision")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a target is asked.

    messages: the system turn, if any, and the first user turn.  follow_ups: later user texts of the same conversation.
    category: of the row, or "".  source: "label:row" of its source.
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


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a data set pinned to a commit.

    label: the file's name without its folder, or the address without its revision.  digest: SHA-256 of the file, or the
    commit.  place: where to read; None for the Hub, of which `options` are the keys of the address.
    """

    label: str
    digest: str
    place: Path | None
    name: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def entries(self) -> Iterator[Prompt | Skip]:
        """Every row in order, read as it is asked for.  Raises DataError when reading stops before the end."""
        for entry in self._rows() if self.place is None else iter_rows(self.place):
            where = f"{self.label}:{row_number(entry.source)}"
            yield _prompt(entry, where) if isinstance(entry, Row) else Skip(source=where, reason=entry.reason)

    def _rows(self) -> Iterator[Row | Skip]:
        options = dict(self.options)
        column, split = options.get("column"), options.get("split", "train")
        records = hub_rows(self.name, split=split, config=options.get("config"), revision=self.digest)
        for number, record in enumerate(records, start=1):
            if not ({column} if column else set(SPELLINGS)) & record.keys():  # no row of a data set has other columns
                raise DataError(
                    f"{self.label}: no column {column or ', '.join(SPELLINGS)}: found {', '.join(sorted(record)[:8])}; "
                    "name a text column with ?column=..."
                )
            where = f"{self.label}:{number}"
            try:
                yield _hub_row(record, column, where)
            except DataError as error:
                yield Skip(source=where, reason=str(error))


def open_sources(sources: Sequence[Path | str]) -> tuple[Source, ...]:
    """Find every source and say what identifies its content.

    Raises DataError for a file that cannot be read, a data set that cannot be reached and a source given twice,
    ConfigError for an address that is none and when `datasets` is missing.
    """
    texts = [str(source) if _is_hub(source) else str(Path(source)) for source in sources]
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        name = twice[0] if _is_hub(twice[0]) else Path(twice[0]).name
        raise DataError(f"{name} is given twice; name each source once")
    paths = [Path(text) for text in texts if not _is_hub(text)]
    try:
        files = iter(zip(file_digests(paths).items(), paths, strict=True))
    except OSError as error:
        raise DataError(f"cannot read {fault_line(error)}") from error
    opened: list[Source] = []
    for text in texts:
        if _is_hub(text):
            opened.append(_open_hub(text))
        else:
            (label, digest), path = next(files)
            opened.append(Source(label, digest, path))
    return tuple(opened)


def read_prompts(source: Source, *, limit: int | None = None) -> PromptReading:
    """The first `limit` prompts.  Raises DataError when nothing is usable, and as `Source.entries`."""
    prompts: list[Prompt] = []
    skips: list[Skip] = []
    for entry in source.entries():
        if limit is not None and len(prompts) >= limit:
            break
        if isinstance(entry, Prompt):
            prompts.append(entry)
        else:
            skips.append(entry)
    if not prompts and limit != 0:
        raise no_usable_row(source.label, skips)
    return PromptReading(prompts=tuple(prompts), skips=tuple(skips))


def row_number(source: str) -> int:
    """The number at the end of "label:row"."""
    return int(source.rpartition(":")[2])


def _is_hub(source: Path | str) -> bool:
    return isinstance(source, str) and source.startswith(HUB)


def _prompt(row: Row, source: str) -> Prompt:
    first = next(index for index, message in enumerate(row.messages) if message["role"] == "user")
    return Prompt(messages=row.messages[: first + 1], follow_ups=row.turns[1:], category=row.category, source=source)


def _open_hub(text: str) -> Source:
    name, _, query = text.removeprefix(HUB).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(_HUB_KEYS)) + [key for key, value in options.items() if not value]
    if not _HUB_NAME.fullmatch(name) or unknown:
        found = f"unknown {', '.join(unknown)}" if unknown else f"'{name}' is no name"
        keys = ", ".join(_HUB_KEYS)
        raise ConfigError(f"cannot read {text!r}: {found}; expected hub:OWNER/NAME?KEY=VALUE&... with keys {keys}")
    commit = hub_commit(name, config=options.get("config"), revision=options.pop("revision", None))
    asked = "&".join(f"{key}={value}" for key, value in sorted(options.items()))
    return Source(f"{HUB}{name}{'?' * bool(asked)}{asked}", commit, None, name, tuple(options.items()))


def _hub_row(record: dict[str, Any], column: str | None, where: str) -> Row:
    if column is not None:
        record = {"turns": [record[column]], "category": record.get("category")}
    row = parse_row(record, source=where)
    try:
        json.dumps(row.messages)  # a row of a file is JSON; one of a data set may hold dates or images
    except (TypeError, ValueError) as error:
        raise DataError(f"not JSON: {error}") from error
    return row
