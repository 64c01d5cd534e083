"""The folder of a run: what stands where, and whether a run may begin in it without replacing what is not its own.

The folder `state` is made before anything else, so whatever stands beside it is a run's.  It knows names, no content.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError
from paceline.training.log import LOG

STATE, BEST, LAST, RECIPE = "state", "best", "last", "recipe.toml"


def check_folder(out: Path, *, resume: bool) -> None:
    """Raises ConfigError when a run in `out` would replace files of the user, or a run that nobody asked to go on with.

    A run that was stopped before its first draft may be begun again; one that kept a draft or a state is resumed.
    """
    there = [name for name in (RECIPE, LOG, BEST, LAST) if (out / name).exists()]  # before the next look: a process may
    if not (out / STATE).is_dir():  # come here when the first of its run has begun
        if there:
            raise ConfigError(
                f"{out} holds {', '.join(there)} and no run ({STATE}/ is missing), so they would be lost; "
                "choose another --out, or move them"
            )
        return
    has_state = any((out / STATE).glob("step-*"))
    if not resume and (has_state or BEST in there or LAST in there):
        raise ConfigError(f"{out} holds a run already; pass --resume to go on with it, or choose another --out")


def begin_folder(out: Path) -> None:
    """Mark `out` as a run's, before its first file."""
    (out / STATE).mkdir(parents=True, exist_ok=True)
