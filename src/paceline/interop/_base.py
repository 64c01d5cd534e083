"""What a foreign format is: a folder that can be read into a draft, written from one, or both.

It knows no format; each is one file of this folder, and what it cannot express it refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.store.checkpoint import LoadedDraft
from paceline.targets.generic import Target


@dataclass(frozen=True, slots=True)
class Format:
    """A foreign format of draft folders.

    check: folder -> nothing; refuses what is plainly not of the format, before a target is loaded for it.
    read: (folder, target) -> draft, strictly: every tensor is used, ignored for a stated reason, or an error.
    write: (draft, folder) writes the folder whole or not at all.  Raises CheckpointError, UnsupportedExport.
    """

    check: Callable[[Path], None]
    read: Callable[[Path, Target], LoadedDraft]
    write: Callable[[LoadedDraft, Path], None]


__all__ = ["Format"]
