"""What happened in a generation: rounds, accepted tokens, acceptance by depth, seconds by phase (docs/glossary.md).

Counts are kept per row, so that errors can be computed over prompts; nothing here knows how tokens were chosen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.records import Tree, Verdict


@dataclass(slots=True)
class RowStats:
    """Counts of one row over its rounds after prefill.

    accepted: drafted tokens committed.  emitted: tokens committed.  drafted: nodes that the target verified.
    offered[d]: rounds whose accepted path reached depth d - 1 with a child offered there; taken[d]: where one was kept.
    runs: how often a round accepted exactly a tokens.
    """

    rounds: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted: int = 0
    offered: Counter[int] = field(default_factory=Counter)
    taken: Counter[int] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)

    @property
    def accepted_length(self) -> float:
        """L: emitted tokens per round, the target's own token included."""
        return self.emitted / self.rounds if self.rounds else 0.0


@dataclass(slots=True)
class RunStats:
    """Counts by row index and seconds by phase of one run."""

    rows: dict[int, RowStats] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0

    def count_round(self, index: int, proposal: Tree, row: int, verdict: Verdict) -> None:
        """Add a round.  Tokens cut off by a stop condition count in neither accepted nor emitted."""
        stats = self.rows.setdefault(index, RowStats())
        stats.rounds += 1
        stats.accepted += verdict.accepted
        stats.emitted += len(verdict.tokens)
        stats.drafted += proposal.counts[row] - 1
        stats.runs[verdict.accepted] += 1
        for depth in range(1, verdict.accepted + 1):
            stats.offered[depth] += 1
            stats.taken[depth] += 1
        refused = len(verdict.tokens) > verdict.accepted  # the last token is the target's own
        if refused and proposal.children[row][verdict.path[-1]]:
            stats.offered[verdict.accepted + 1] += 1

    @property
    def total(self) -> RowStats:
        """All rows together."""
        total = RowStats()
        for stats in self.rows.values():
            total.rounds += stats.rounds
            total.accepted += stats.accepted
            total.emitted += stats.emitted
            total.drafted += stats.drafted
            total.offered.update(stats.offered)
            total.taken.update(stats.taken)
            total.runs.update(stats.runs)
        return total


def conditional_acceptance(stats: RowStats) -> list[float]:
    """P(a child is accepted at depth d | the path reached depth d - 1 and one was offered), for d = 1, 2, ..."""
    return [stats.taken[depth] / stats.offered[depth] for depth in range(1, max(stats.offered, default=0) + 1)]


def cumulative_acceptance(stats: RowStats) -> list[float]:
    """Share of rounds that accepted at least d tokens, for d = 1, 2, ..."""
    deepest = max(stats.taken, default=0)
    return [stats.taken[depth] / stats.rounds for depth in range(1, deepest + 1)]
