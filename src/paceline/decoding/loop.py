"""The decode loop: prefill, then rounds of propose, score, verify, commit; plain decoding is the loop without a draft.

It knows targets, proposers and rules only by their contracts, and it is the only place where the cached length, the
draft's state and the ids of a row move, together.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.decoding.propose import NoDraft, Proposer
from paceline.decoding.sampling import RowDice
from paceline.decoding.stats import RunStats
from paceline.decoding.verify import Process, Recorder, Stop, walk
from paceline.errors import ConfigError
from paceline.records import Tree, Verdict
from paceline.targets._cache import TargetCache
from paceline.targets.generic import Target

RESERVED = 2048  # new tokens that a cache has room for at first; it grows for those who write more


@dataclass(slots=True)
class RowState:
    """One sequence while it is decoded.

    index: its place in the request.  ids: prompt and committed tokens.  from_draft: per new token, whether the draft
    wrote it.  process, is_stop, record: the row's options.  dice: the row's draws; is_greedy: verify by argmax.
    """

    index: int
    ids: list[int]
    prompt_length: int
    max_new_tokens: int
    process: Process | None
    is_stop: Stop
    dice: RowDice
    is_greedy: bool
    record: Recorder | None = None
    from_draft: list[bool] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - (len(self.ids) - self.prompt_length)


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens a round added to a row, with who wrote each: True = the draft."""

    row: int
    tokens: list[int]
    from_draft: list[bool]
    is_last: bool


class DecodeLoop:
    """Decodes a batch of rows of any lengths; each gets what it would get alone.

    target, proposer: bound to each other by the caller.  stats: filled as the loop runs.
    """

    def __init__(self, target: Target, proposer: Proposer, *, scratch: int) -> None:
        self.target, self.proposer, self.scratch = target, proposer, scratch
        self.stats = RunStats()

    def run(self, rows: Sequence[RowState]) -> Iterator[Commit]:
        """Yields what each round commits, until every row has ended."""
        live = [row for row in rows if row.max_new_tokens > 0]
        if not live:
            return
        self._refuse_lengths(live)
        capacity = max(len(row.ids) + min(row.max_new_tokens, RESERVED) for row in live) + self.scratch
        cache = self.target.new_cache(len(live), capacity=capacity)
        self.proposer.begin(len(live), capacity=capacity)
        commits, live = self._prefill(cache, live)
        yield from commits
        while live:
            commits, live = self._round(cache, live)
            yield from commits

    def _refuse_lengths(self, rows: Sequence[RowState]) -> None:
        """Learned positions end somewhere; rotary ones do not."""
        limit = self.target.learned_positions
        longest = max(len(row.ids) + row.max_new_tokens for row in rows)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"prompt and new tokens may come to {longest}; {self.target.name} has learned positions for {limit}: "
                "lower max_new_tokens or shorten the prompt"
            )

    @contextmanager
    def _tapped(self) -> Generator[None]:
        """The proposer's taps for one call only: another generation may use the target between our rounds."""
        before = self.target.taps
        self.target.set_taps(self.proposer.taps)
        try:
            yield
        finally:
            self.target.set_taps(before)

    def _prefill(self, cache: TargetCache, live: list[RowState]) -> tuple[list[Commit], list[RowState]]:
        start = time.perf_counter()
        for row in live:
            row.dice.begin_round(len(row.ids))
        with self._tapped():
            scores = self.target.prefill(cache, [torch.tensor(row.ids) for row in live])
        root_only = NoDraft().propose([0] * len(live), limits=[], dice=[])
        verdicts = [self._verify(root_only, place, scores.logits[place], row) for place, row in enumerate(live)]
        fresh = [row.ids[1:] for row in live]
        self.stats.prefill_seconds += time.perf_counter() - start
        return self._settle(cache, live, verdicts, fresh, scores.taps)

    def _round(self, cache: TargetCache, live: list[RowState]) -> tuple[list[Commit], list[RowState]]:
        begin = time.perf_counter()
        for row in live:
            row.dice.begin_round(len(row.ids))
        proposal = self.proposer.propose(
            [row.ids[-1] for row in live],
            limits=[row.remaining - 1 for row in live],
            dice=[row.dice for row in live],
        )
        drafted = time.perf_counter()
        cache.ensure(max(cache.lengths) + proposal.tokens.shape[1])
        with self._tapped():
            scores = self.target.score(cache, proposal.tokens, mask=proposal.mask, depths=proposal.depths)
        scored = time.perf_counter()
        verdicts = [self._verify(proposal, place, scores.logits[place], row) for place, row in enumerate(live)]
        for place, (row, verdict) in enumerate(zip(live, verdicts, strict=True)):
            self.stats.count_round(row.index, proposal, place, verdict)
        paths = [verdict.path for verdict in verdicts]
        cache.commit(paths)
        taps = _gather(scores.taps, paths)
        self.stats.draft_seconds += drafted - begin
        self.stats.target_seconds += scored - drafted
        self.stats.verify_seconds += time.perf_counter() - scored
        return self._settle(cache, live, verdicts, [verdict.tokens for verdict in verdicts], taps)

    def _verify(self, proposal: Tree, place: int, logits: Tensor, row: RowState) -> Verdict:
        verdict = walk(
            proposal, place, logits, ids=row.ids, process=row.process, is_stop=row.is_stop,
            dice=None if row.is_greedy else row.dice, record=row.record,
        )  # fmt: skip
        row.from_draft += [index < verdict.accepted for index in range(len(verdict.tokens))]
        return verdict

    def _settle(
        self,
        cache: TargetCache,
        live: list[RowState],
        verdicts: list[Verdict],
        fresh: list[list[int]],
        taps: Tensor | None,
    ) -> tuple[list[Commit], list[RowState]]:
        """Report the round, drop the rows that ended, and show the others' tokens to the proposer."""
        commits = [
            Commit(row.index, verdict.tokens, row.from_draft[-len(verdict.tokens) :], verdict.stopped)
            for row, verdict in zip(live, verdicts, strict=True)
        ]
        stay = [place for place, verdict in enumerate(verdicts) if not verdict.stopped]
        if not stay:
            return commits, []
        if len(stay) < len(live):
            cache.keep_rows(stay)
            self.proposer.keep_rows(stay)
            taps = None if taps is None else taps[torch.tensor(stay)]
        rows = [live[place] for place in stay]
        tokens = [fresh[place] for place in stay]
        begin = time.perf_counter()
        self.proposer.observe(tokens, context=[row.ids for row in rows], taps=taps)
        self.stats.draft_seconds += time.perf_counter() - begin
        return commits, rows


def _gather(taps: Tensor | None, paths: list[list[int]]) -> Tensor | None:
    """Features of each row's accepted nodes, in order: [B, N, K*H] -> [B, longest path, K*H]."""
    if taps is None:
        return None
    longest = max(len(path) for path in paths)
    index = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=taps.device)
    return taps.gather(1, index[:, :, None].expand(-1, -1, taps.shape[-1]))
