"""How a command opens a draft by name: a folder, a weightless plug-in, or none.

It knows names; formats are the business of `store.checkpoint`.
"""

from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.decoding.binding import Draft
    from paceline.targets.generic import Target

NO_DRAFT = "none"
WEIGHTLESS = ("ngram",)


def check_draft(name: str, *, option: str = "--draft") -> None:
    """Refuse what cannot be a draft before a target is loaded for it.  Raises ConfigError that names the option."""
    from paceline.errors import CheckpointError
    from paceline.store.checkpoint import read_info

    if name == NO_DRAFT or name in WEIGHTLESS:
        return
    try:
        read_info(draft_folder(name, option=option))
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}") from error


def open_draft(name: str, *, target: "Target") -> "Draft | None":
    """The draft of a name, checked against the target.  Raises ConfigError, CheckpointError."""
    from paceline.drafts._base import DraftPlugin
    from paceline.plugins import load_plugin
    from paceline.store.checkpoint import load_draft
    from paceline.targets._facts import facts_of

    if name == NO_DRAFT:
        return None
    if name in WEIGHTLESS:
        plugin = load_plugin("drafts", name=name)
        assert isinstance(plugin, DraftPlugin)
        return plugin.build(plugin.configure(facts_of(target.model, target.tokenizer), {}), None)
    return load_draft(draft_folder(name), target=target).draft


def draft_folder(name: str, *, option: str = "--draft") -> "Path":
    """The folder of a draft: a path, or the name of one that comes with the package.  Raises ConfigError."""
    from pathlib import Path

    from paceline.shipped import shipped_drafts

    shipped = shipped_drafts()
    if name in shipped:
        return shipped[name]
    if not name or not Path(name).is_dir():
        known = ", ".join([*shipped, *WEIGHTLESS, NO_DRAFT])
        raise ConfigError(f"{option}: no folder '{name}'; expected a draft folder, or one of {known}")
    return Path(name)
