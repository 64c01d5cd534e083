"""How a command opens a draft by name: a folder, a weightless plug-in, or none.

It knows names; formats are the business of `store.checkpoint`.
"""

from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.decoding.binding import Draft
    from paceline.targets.generic import Target

NO_DRAFT = "none"
WEIGHTLESS = ("ngram",)


def open_draft(name: str, *, target: "Target") -> "Draft | None":
    """The draft of a name, checked against the target.  Raises ConfigError, CheckpointError."""
    from pathlib import Path

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
    if not Path(name).exists():
        raise ConfigError(f"--draft: no folder {name}; expected a draft folder, {', '.join(WEIGHTLESS)} or {NO_DRAFT}")
    return load_draft(name, target=target).draft
