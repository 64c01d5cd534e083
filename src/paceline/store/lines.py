"""JSONL files that grow by a line at a time and may be cut off by a kill in the middle of one.

What a line holds is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, DataError
from paceline.store.files import is_special

Read = TypeVar("Read")


def read_lines(path: Path, *, read: Callable[[dict[str, Any]], Read]) -> Iterator[Read]:
    """What `read` makes of each line of a JSONL file that we wrote; a torn last line (kill -9) is cut off the file.

    It is cut off last of all, once every whole line was read: a file that is not ours stays as it is.
    Raises DataError naming a line that is no JSON object, or of which `read` can make nothing.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            yield read(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            shown = line[:40].decode("utf-8", errors="replace")
            raise DataError(
                f"{path}:{number}: found '{shown}', expected a line that paceline wrote; remove that line and run again"
            ) from error
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def append_line(file: FileIO, row: dict[str, Any]) -> None:
    """One row, one line, handed to the system at once.

    file: unbuffered, so that a line for which there is no room is not tried again when the file is closed.
    Raises OSError with the name of the file.
    """
    left = memoryview((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from error


def open_lines(path: Path) -> FileIO:
    """A file to append lines to.  Raises ConfigError for a pipe, which would keep us waiting for a reader."""
    if is_special(path):
        raise ConfigError(f"{path} is a device or a pipe, expected a file; remove it, or choose another --out")
    return FileIO(path, "a")
