"""Whether a command may and can write the record that --out names, asked before hours are spent on it.

It writes nothing; a disk that fills up meanwhile is the business of whoever writes.
"""

import os
from pathlib import Path

from paceline.errors import ConfigError
from paceline.store.files import is_special


def check_record_path(path: Path, *, may_replace: bool, option: str = "--out") -> None:
    """Raises ConfigError when `path` is a folder, lies under a file, or stands where nothing can be written.

    may_replace: whether a record that is there may be lost; otherwise it is refused too.
    """
    if path.is_file() and not may_replace:
        raise ConfigError(f"{option}: {path} exists; choose another {option}, or pass --force to replace it")
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder, expected a file; name one in it, such as {path}/record.json")
    if is_special(path):
        raise ConfigError(f"{option}: {path} is a device or a pipe, expected a file; choose another {option}")
    _check_place(path.parent, option=option)


def check_new_folder(path: Path, *, option: str = "--out") -> None:
    """Raises ConfigError when `path` is no folder, holds files, or stands where nothing can be written."""
    _check_place(path, option=option)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{option}: {path} holds files; expected a new folder, or an empty one")


def _check_place(place: Path, *, option: str) -> None:
    """Raises ConfigError when no folder can be made or written to at `place`."""
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{option}: {place} is a file, expected a folder; choose another {option}")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{option}: {place} cannot be written to; choose another {option}")
