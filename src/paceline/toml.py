"""TOML in and out: a file that is none is one line, and what `tomllib` cannot write is written here.

It knows tables, arrays and scalars as `tomllib` returns them, and refuses everything else by key; it knows no schema.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """The table of a TOML file in UTF-8, with or without a byte order mark.

    Raises ConfigError, one line that names the file: it cannot be read, is not UTF-8, or is not TOML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8; expected a TOML file in UTF-8: save it in that encoding"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; expected a TOML file") from error
    return parse_toml(text, source=str(path))


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """The table of a text.  source: how errors name it.  Raises ConfigError, one line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    except RecursionError:  # of tens of thousands of brackets; their traceback is as long
        raise ConfigError(f"{source}: not valid TOML: nested too deeply") from None


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML text of a table, such that `tomllib.loads(to_toml(table)) == table`.

    Values are str, bool, int, float, lists (tuples are written as lists) and tables of these.
    Raises ConfigError naming the key for any other value; None too, because TOML has no null: leave the key out.
    """
    return "\n".join(_table_lines(table, path=())).strip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], *, path: tuple[str, ...]) -> list[str]:
    """Scalars first, then one `[section]` for each nested table, as the grammar demands."""
    lines = [
        f"{_key(key)} = {_value(value, path=(*path, key))}" for key, value in table.items() if not _is_table(value)
    ]
    for key, value in table.items():
        if _is_table(value):
            inner = (*path, key)
            lines += ["", f"[{'.'.join(_key(part) for part in inner)}]", *_table_lines(value, path=inner)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"cannot write key {key!r} as TOML: found {type(key).__name__}, expected text")
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any, *, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):  # before int: True is an int in Python
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item, path=path) for item in value) + "]"
    if isinstance(value, Mapping):  # a table inside an array
        return "{" + ", ".join(f"{_key(key)} = {_value(item, path=(*path, key))}" for key, item in value.items()) + "}"
    raise ConfigError(
        f"cannot write {'.'.join(path)} as TOML: found {type(value).__name__}, "
        "expected text, a number, true/false, a list or a table"
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)  # the shortest text that reads back as the same float


def _text(value: str) -> str:
    return '"' + "".join(_ESCAPES.get(char, char if _is_plain(char) else f"\\u{ord(char):04x}") for char in value) + '"'


def _is_plain(char: str) -> bool:
    """Whether TOML allows the character unescaped in a basic string: no control characters."""
    return ord(char) >= 0x20 and ord(char) != 0x7F
