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


def draft_folder(name: str) -> "Path":
    """The folder of a draft: a path, or the name of one that comes with the package.  Raises ConfigError."""
    from pathlib import Path

    from paceline.shipped import shipped_drafts

    shipped = shipped_drafts()
    if name in shipped:
        return shipped[name]
    if not Path(name).is_dir():
        known = ", ".join([*shipped, *WEIGHTLESS, NO_DRAFT])
        raise ConfigError(f"--draft: no folder {name}; expected a draft folder, or one of {known}")
    return Path(name)
