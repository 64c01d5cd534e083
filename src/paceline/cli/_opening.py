"""How a command opens a draft by name: a folder, a weightless plug-in, or none.

It knows names; formats are the business of `store.checkpoint`.
"""

from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.decoding.binding import Draft
    from paceline.targets.generic import Target

NO_DRAFT = "none"
WEIGHTLESS = ("ngram",)
OTHERS = (*WEIGHTLESS, NO_DRAFT)  # what --draft takes beside drafts with weights


def check_draft(name: str, *, option: str = "--draft", others: "Sequence[str]" = OTHERS) -> None:
    """Refuse what cannot be a draft before a target is loaded for it.

    others: names that the option takes beside drafts with weights.  Raises ConfigError that names the option.
    """
    from paceline.errors import CheckpointError
    from paceline.store.checkpoint import read_info
    from paceline.store.draft_names import find_draft

    if name in others:
        return
    try:
        read_info(find_draft(name, others=others))
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
    return load_draft(name, target=target).draft
