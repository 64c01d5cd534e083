"""Decode one prompt with a draft as `generate` does, and keep every round that it had.

The loop, the proposer and the rules are those of decoding; only the laws are kept and the rounds written down.
"""

from __future__ import annotations

import torch

from paceline.decoding import options as opt
from paceline.decoding.binding import make_loop, make_row
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.stats import RunStats
from paceline.drafts._base import DraftNetwork
from paceline.measure.diagnose import Reader, Round
from paceline.measure.diagnose_record import Diagnosed
from paceline.measure.systems import Sampling
from paceline.records import Tree, Verdict
from paceline.targets.generic import Target


class Witness(RunStats):
    """Statistics that keep the rounds of the one row of a run.  max_new_tokens: of that row."""

    def __init__(self, reader: Reader, *, max_new_tokens: int) -> None:
        super().__init__()
        self.rounds: list[Round] = []
        self._reader, self._left = reader, max_new_tokens - 1  # prefill writes the first token

    def count_round(self, index: int, proposal: Tree, row: int, verdict: Verdict) -> None:
        """Add a round; the target's own token takes one of those that are left."""
        super().count_round(index, proposal, row, verdict)
        each = self._reader.read(proposal, row, verdict, limit=self._left - 1)
        self._left -= len(verdict.tokens)
        if each is not None:
            self.rounds.append(each)


def diagnose_prompt(
    target: Target, draft: DraftNetwork, ids: list[int], *, plan: ProposalPlan, sampling: Sampling, seed: int
) -> Diagnosed:
    """The same tokens as `generate` with these arguments, and the rounds.

    ids: the prompt.  Raises as `generate`, and UnsupportedOption for a draft whose proposals carry no laws.
    """
    given = opt.GenerationOptions(**sampling.options)
    options = opt.with_sampling(opt.with_stop_strings(given, model=target.model, tokenizer=target.tokenizer))
    captured = opt.capture(target.model, torch.tensor([ids], device=target.device), options=options)
    row = make_row(captured, row=0, index=0, padding=0, seed=seed)
    loop = make_loop(draft, target, plan=plan, captured=captured)
    loop.proposer.keeps_laws = True
    witness = Witness(Reader(draft.vocab, plan), max_new_tokens=row.max_new_tokens)
    loop.stats = witness
    for _ in loop.run([row]):
        continue
    return Diagnosed(row.new_tokens, witness.total, witness.rounds)
