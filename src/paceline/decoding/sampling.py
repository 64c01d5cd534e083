"""Randomness of a generation: the draft's warped law, and one row's dice, which its neighbours cannot move.

The draft uses the temperature, top-k and top-p of the request; any law would be exact as long as the one that was drawn
from is the one that verification divides by.  Dice are seeded anew each round from (seed, tokens committed), so that a
row draws the same whatever batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops import sampling

MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring seeds over the generator's state


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Warpers of the draft's law for `sampled` proposals."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def law(self, logits: Tensor) -> Tensor:
        """[..., W] -> [..., W] probabilities."""
        return sampling.probabilities(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class RowDice:
    """The random draws of one row: one stream for the draft, one for verification."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draft = torch.Generator()
        self.verify = torch.Generator()

    def begin_round(self, committed: int) -> None:
        """Seed both streams from the row's seed and the number of committed tokens."""
        base = (self._seed * MIX + committed * 2) % 2**63
        self._draft.manual_seed(base)
        self.verify.manual_seed(base + 1)

    def draw_children(self, law: Tensor, *, count: int) -> Tensor:
        """[m, W] -> [m, count] distinct ids in the order drawn, -1 where the support is used up."""
        return sampling.draw_without_replacement(law, count=count, generator=self._draft)
