"""A name becomes the folder of a draft: one that comes with the package, or a path; Python and commands ask here.

It knows which folders are drafts and, for those that are not, what to do; not what is in them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.shipped import shipped_drafts
from paceline.store.draft_facts import FACTS
from paceline.store.files import remove_partial


def find_draft(name: Path | str, *, others: Sequence[str] = ()) -> Path:
    """The folder of a draft.

    name: of a draft that comes with the package, or a path; a folder named like one of ours needs a `./` in front, or
    to be given as a Path.  others: names that the caller takes besides, for the error.  A folder that a kill caught
    while it was being replaced is put back.  Raises CheckpointError that says what to do.
    """
    shipped = shipped_drafts()
    _refuse_kind(name)
    if isinstance(name, str) and name in shipped:
        return shipped[name]
    folder = Path(os.path.expanduser(name))  # unlike Path's, it has an answer for every ~name
    if str(name) and not os.path.isdir(folder):  # nor does this stumble over a name that is too long
        remove_partial(folder)
    if not str(name) or not os.path.isdir(folder):
        known = ", ".join([*shipped, *others])
        raise CheckpointError(f"no folder '{name}'; expected a draft folder, or one of {known}")
    if not (folder / FACTS).is_file():
        raise CheckpointError(f"{folder}: no {FACTS} in it{_advice(folder)}")
    return folder


def _refuse_kind(name: object) -> None:
    if not isinstance(name, str | Path):
        raise CheckpointError(f"found a {type(name).__name__}, expected the name or the folder of a draft")


def _advice(folder: Path) -> str:
    """What a folder without draft.toml may be, and what to do with it."""
    if (folder / "best" / FACTS).is_file():
        return f"; did you mean {folder / 'best'}?"
    weights = sorted(path.name for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
    if weights and (folder / "config.json").is_file():
        return (
            f", but config.json and {weights[0]}, as in other formats; if it is a published EAGLE-3 draft, run: "
            f"paceline convert {shlex.quote(str(folder))} OUT --target TARGET --from eagle"
        )
    return "; expected a folder written by `paceline train`, such as OUT/best"
