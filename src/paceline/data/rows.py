"""Chat rows from JSONL files: every line is either accepted as a `Row` or skipped with its line number and a reason.

This module knows no tokenizer and no chat template: whether a row can be rendered is decided in `data.chat`.

Accepted: files `*.jsonl` or `*.json` with one object per line, also `.gz` and `.xz`; UTF-8 with or without BOM; LF or
CRLF; blank lines. An object holds exactly one of
  messages        [{"role", "content", ...}]        roles system, user, assistant, tool (developer is read as system)
  conversations   [{"from", "value"}]               ShareGPT names: human, gpt, system, observation, function_call ...
  turns           ["user text", ...]                user turns only: a prompt, nothing to train on
or none of these and
  prompt          "user text"                       one user turn, as `turns` with one
Beside one of the three, `prompt` is a key like any other: several published sets repeat the first user turn under it.
Skipped: lines that are not JSON, not UTF-8 or not an object; no or several of the three keys; an empty conversation; a
system turn that is not first; a conversation whose first turn (after system) is not the user's; two user or two
assistant turns in a row; a tool turn that follows no tool call; a user turn right after a tool turn; content that is
null (allowed with tool calls, then read as ""), empty, or has parts other than text; tool arguments that are neither an
object nor the JSON text of one. Keys of a message that are not named here reach the chat template untouched.
Of a row's other keys, `category` names its kind, and `finish = "length"` says that its last answer was cut before its
end (see `data.examples`).
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.errors import DataError

Message = dict[str, Any]
"""One chat turn as a chat template takes it: the template's own contract, hence a plain dict."""

_KINDS = ("messages", "conversations", "turns")
_PROMPT = "prompt"  # read only where there is none of them
SPELLINGS = (*_KINDS, _PROMPT)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "call",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One accepted conversation.

    messages: the turns, tool arguments as objects.  turns: the user's texts in order.  tools: tool schemas or None.
    category: the row's `category` or "".  source: "file:line".  fields: all other keys of the row.
    """

    messages: tuple[Message, ...]
    turns: tuple[str, ...]
    tools: tuple[Any, ...] | None
    category: str
    source: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skip:
    """A row that is not used: where it stands and why ("kind" or "kind: detail")."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What one or several files held: accepted rows and skipped ones, in file order."""

    rows: tuple[Row, ...]
    skips: tuple[Skip, ...]

    def summary(self) -> str:
        """The closing count, one line."""
        return f"{len(self.rows)} rows accepted, {len(self.skips)} skipped" + tally(self.skips)


def tally(skips: Iterable[Skip]) -> str:
    """' (3 x kind, 1 x other kind)', the most frequent first; '' without skips."""
    counts = Counter(reason_kind(skip.reason) for skip in skips)
    return f" ({', '.join(f'{n} x {kind}' for kind, n in counts.most_common())})" if counts else ""


def reason_kind(reason: str) -> str:
    """What reasons are counted by: "kind: detail" -> "kind"."""
    return reason.split(":", 1)[0]


def no_usable_row(names: str, skips: Sequence[Skip]) -> DataError:
    """The error to raise when of `names` every row was skipped."""
    first = f"; first: {skips[0].source}: {skips[0].reason}" if skips else ""
    return DataError(
        f"no usable row in {names}: {len(skips)} skipped{tally(skips)}{first}; "
        f"expected one JSON object per line with one of {', '.join(SPELLINGS)}"
    )


def read_rows(paths: Path | str | Sequence[Path | str], *, limit: int | None = None) -> Reading:
    """Read whole files; `limit` stops after that many accepted rows.

    Raises DataError when a file cannot be read to its end or when no row at all is accepted.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    rows: list[Row] = []
    skips: list[Skip] = []
    for path in files:
        for entry in iter_rows(path):
            if limit is not None and len(rows) >= limit:
                break
            if isinstance(entry, Row):
                rows.append(entry)
            else:
                skips.append(entry)
    if not rows and limit != 0:
        raise no_usable_row(", ".join(str(path) for path in files), skips)
    return Reading(rows=tuple(rows), skips=tuple(skips))


def iter_rows(path: Path | str) -> Iterator[Row | Skip]:
    """Yield every non-blank line of a file as a Row or a Skip.  Raises DataError when the file itself is unreadable."""
    for number, line in _lines(Path(path)):
        source = f"{path}:{number}"
        try:
            yield parse_row(_decode(line, is_first=number == 1), source=source)
        except DataError as error:
            yield Skip(source=source, reason=str(error))


def parse_row(record: object, *, source: str) -> Row:
    """One decoded JSON value -> Row.  Raises DataError with the reason (the rules above) when it is refused."""
    if not isinstance(record, dict):
        raise DataError(f"not an object: found {_kind(record)}")
    record = cast("dict[str, Any]", record)
    kind, entries = _conversation(record)
    turns, messages = (), ()
    if kind in ("turns", _PROMPT):
        turns = tuple(_text(entry, "user") for entry in entries)
        messages = ({"role": "user", "content": turns[0]},)
    else:
        read = _message if kind == "messages" else _sharegpt
        messages = tuple(read(entry) for entry in entries)
        _check_order(messages)
        turns = tuple(message["content"] for message in messages if message["role"] == "user")
    category, tools = record.get("category"), record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"tools must be a list: found {_kind(tools)}")
    rest = {key: value for key, value in record.items() if key not in (kind, "category", "tools")}
    return Row(
        messages=messages,
        turns=turns,
        tools=tuple(tools) if tools else None,
        category=category if isinstance(category, str) else "",
        source=source,
        fields=rest,
    )


def _conversation(record: dict[str, Any]) -> tuple[str, list[object]]:
    """The key that holds the conversation, and its turns.  Raises DataError."""
    found = [kind for kind in _KINDS if kind in record]
    if not found and isinstance(record.get(_PROMPT), str):
        return _PROMPT, [record[_PROMPT]]
    if len(found) != 1:
        keys = ", ".join(found) if found else ", ".join(sorted(map(str, record))[:6]) or "nothing"
        if _PROMPT in record and not found:
            keys = f"{_PROMPT}, which is {_kind(record[_PROMPT])} and not text"
        raise DataError(f"expected exactly one of {', '.join(SPELLINGS)}: found {keys}")
    entries = record[found[0]]
    if not isinstance(entries, list) or not entries:
        raise DataError(f"empty conversation: {found[0]} is {_kind(entries)}")
    return found[0], cast("list[object]", entries)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip(b" \t\r\n\xef\xbb\xbf"):
                    yield number, line
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        where = f" after line {number}" if number else ""
        raise DataError(
            f"cannot read {path}{where}: {error or type(error).__name__}; expected a complete file"
        ) from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")


def _decode(line: bytes, *, is_first: bool) -> object:
    try:
        text = line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte {error.start + 1} of the line") from error
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode("utf-8")  # a lone surrogate has no tokens
    except UnicodeEncodeError as error:
        raise DataError("not Unicode text: a lone surrogate escape") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    return record


def _message(entry: object) -> Message:
    if not isinstance(entry, dict):
        raise DataError(f"a turn is not an object: found {_kind(entry)}")
    entry = cast(Message, entry)
    role = _ROLES.get(str(entry.get("role")))
    if role is None:
        raise DataError(f"unknown role: {entry.get('role')!r}, expected one of {', '.join(_ROLES)}")
    message = {**entry, "role": role}
    calls = message.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise DataError(f"tool calls in a turn of {role}")
        if not isinstance(calls, list):
            raise DataError(f"tool calls must be a list: found {_kind(calls)}")
        message["tool_calls"] = [_call(call) for call in calls]
    content = message.get("content")
    message["content"] = "" if calls and content in (None, "", []) else _text(content, role)
    return message


def _sharegpt(entry: object) -> Message:
    if not isinstance(entry, dict):
        raise DataError(f"a turn is not an object: found {_kind(entry)}")
    entry = cast(Message, entry)
    role = _SHAREGPT.get(str(entry.get("from")))
    if role is None:
        raise DataError(f"unknown role: {entry.get('from')!r}, expected one of {', '.join(_SHAREGPT)}")
    if role == "call":
        calls = _arguments(entry.get("value"), what="function_call")
        return {"role": "assistant", "content": "", "tool_calls": [_call({"type": "function", "function": calls})]}
    return {"role": role, "content": _text(entry.get("value"), role)}


def _call(call: object) -> Message:
    function = cast(Message, call).get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError("a tool call without a function name")
    arguments = _arguments(function.get("arguments", {}), what="tool arguments")
    called = {**function, "arguments": arguments}
    outer = {key: value for key, value in cast(Message, call).items() if function is not call and key != "function"}
    return {"type": "function", **outer, "function": called}


def _arguments(value: object, *, what: str) -> Message:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{what} are not JSON: {value[:40]!r}") from error
    if not isinstance(value, dict):
        raise DataError(f"{what} are not an object: found {_kind(value)}")
    return cast(Message, value)


def _text(content: object, role: str) -> str:
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise DataError(f"content with parts other than text: turn of {role}")
        content = "".join(cast("list[str]", parts))
    if not isinstance(content, str):
        raise DataError(f"content is not text: turn of {role} holds {_kind(content)}")
    if not content.strip() and role != "tool":
        raise DataError(f"empty content: turn of {role}")
    return content


def _check_order(messages: tuple[Message, ...]) -> None:
    before = "system"
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "system" and index > 0:
            raise DataError(f"system turn that is not first: turn {index + 1}")
        if before == "system" and role in ("assistant", "tool"):
            raise DataError(f"first turn is not the user's: found {role}")
        if role == before and role in ("user", "assistant"):
            raise DataError(f"two {role} turns in a row: turns {index} and {index + 1}")
        if role == "tool" and before != "tool" and "tool_calls" not in messages[index - 1]:
            raise DataError(f"tool turn without a tool call before it: turn {index + 1}")
        if role == "user" and before == "tool":
            raise DataError(f"user turn right after a tool turn: turn {index + 1}")
        before = role
    if before == "system":
        raise DataError("empty conversation: only a system turn")


def _kind(value: object) -> str:
    names: dict[type[object], str] = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true/false",
        int: "a number",
        float: "a number",
    }
    name = "null" if value is None else names.get(type(value), type(value).__name__)
    return f"an empty {name.split()[-1]}" if value in ([], {}, "") else name
