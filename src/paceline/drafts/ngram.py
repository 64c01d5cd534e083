"""Prompt lookup: the continuation of the longest recent suffix that occurred before; no weights, nothing to train.

It keeps the draft contract honest and is the baseline that every trained draft must beat.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from paceline.config import parse_section
from paceline.drafts._base import DraftConfig, DraftPlugin
from paceline.errors import ConfigError
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts


class NgramConfig(DraftConfig):
    """Longest and shortest suffix, in tokens, that is looked up."""

    longest: int = Field(default=3, ge=1)
    shortest: int = Field(default=1, ge=1)


class Ngram:
    """Continues a context by what followed the latest earlier occurrence of its last tokens."""

    def __init__(self, config: NgramConfig) -> None:
        self.config = config

    def continuations(self, context: Sequence[int], *, length: int, count: int) -> list[list[int]]:
        """Up to `count` different continuations of up to `length` ids, longest match first, then the most recent."""
        ids = list(context)
        found: list[list[int]] = []
        for size in range(min(self.config.longest, len(ids) - 1), self.config.shortest - 1, -1):
            suffix = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start : start + size] != suffix:
                    continue
                candidate = ids[start + size : start + size + length]
                if not any(known[: len(candidate)] == candidate for known in found):
                    found.append(candidate)
                if len(found) == count:
                    return found
        return found


def configure(_facts: TargetFacts, options: dict[str, object]) -> NgramConfig:
    """The recipe's options; a target has no say."""
    config = parse_section(NgramConfig, table=options, source="ngram", prefix=("draft", "options"))
    if config.shortest > config.longest:
        raise ConfigError(f"ngram: needs shortest <= longest, found {config.shortest} and {config.longest}")
    return config


def build(config: DraftConfig, _vocab: DraftVocab | None) -> Ngram:
    """The lookup itself."""
    assert isinstance(config, NgramConfig)
    return Ngram(config)


PLUGIN = DraftPlugin(config=NgramConfig, configure=configure, build=build, has_weights=False)
