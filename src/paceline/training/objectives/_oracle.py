"""What the target emitted behind every row, depth by depth: the path that a draft is held against.

At temperature 0 the oracle is the target's own choice; a path ends behind the first place where the text took another,
since nobody has asked the target how it would go on there.  At T > 0 the text is the oracle: it has to be drawn from
the target's law.  This module knows no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.training.collate import PREDICT
from paceline.training.objectives._base import TargetView, TrainingBatch
from paceline.training.objectives._laws import TargetLaws, target_laws
from paceline.training.paths import guided


@dataclass(frozen=True, slots=True)
class OracleStep:
    """One depth of the paths behind n rows.

    active: [n] bool, rows that are supervised at this depth.  goes_on: [n] bool, rows whose path leads here: `place`
    [m] are their numbers.  hidden: [m, ...], what the draft's head reads.  label: [m] int64 draft id that the oracle
    says, -1 outside the draft's vocabulary.  best: [m] int64, draft id of the target's choice.
    """

    active: Tensor
    goes_on: Tensor
    place: Tensor
    hidden: Tensor
    label: Tensor
    best: Tensor
    laws: TargetLaws
    index: Tensor
    temperature: float

    def own_law(self, part: slice | Tensor) -> Tensor:
        """The target's law over the draft's vocabulary: [m, W] float32."""
        return self.laws.law[self.index[part]]

    def law(self, part: slice | Tensor) -> Tensor:
        """The law that verifies: [m, W] float32; at temperature 0 one at the target's choice."""
        own = self.own_law(part)
        if self.temperature == 1:
            return own
        if self.temperature:
            return (own.log() / self.temperature).softmax(dim=-1)
        return torch.zeros_like(own).scatter_(1, self.best[part, None], 1.0)


def oracle_steps(
    draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, steps: int, temperature: float, seed: int | None
) -> list[OracleStep]:
    """Depths 0 to steps - 1.  Where the target's choice is outside the draft's vocabulary a path ends, as in `ttt`."""
    laws = target_laws(draft, batch, target)
    found: list[OracleStep] = []
    leads_on: Tensor | None = None
    for one in guided(draft, batch, target, steps=steps, seed=seed):
        index = one.rows.take(laws.index, ahead=PREDICT - 1 + one.step)
        best = torch.where(one.active, laws.best[index.clamp_min(0)], -1)
        goes_on = one.active & (best >= 0)
        if leads_on is not None:
            goes_on &= leads_on
        place = goes_on.nonzero().flatten()
        text = draft.vocab.to_draft(one.rows.take(batch.ids, ahead=PREDICT + one.step))
        leads_on = goes_on & ((text == best) if temperature == 0 else (text >= 0))
        label = best if temperature == 0 else text
        found.append(
            OracleStep(
                one.active, goes_on, place, one.hidden[place], label=label[place], best=best[place], laws=laws,
                index=index[place], temperature=temperature,
            )
        )  # fmt: skip
    return found
