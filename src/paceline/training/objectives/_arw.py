"""Adaptive rejection weighting: how much the corrected paths count, from what the last batches were like (VSD's ARW).

c = -Cov(accepted, rejected) / Var(rejected) over the paths' scores, cut to [0, 1] and scaled by the share of proposals
that are accepted, so that a weak draft is not flooded by corrections.  It knows scores, not where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.paths import control_coefficient

FIELDS = 5  # means of a, r, a r, r r, and of the accepted share


class RejectionWeight:
    """Averages over about `memory` batches; each process of a run keeps its own."""

    def __init__(self, *, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._sums = torch.zeros(FIELDS, dtype=torch.float64)
        self._weight = 0.0

    @property
    def value(self) -> float:
        """c, from the batches before this one; 1 before the first."""
        if not self._weight:
            return 1.0
        a, r, ar, rr, share = (self._sums / self._weight).tolist()
        return control_coefficient(ar - a * r, rr - r * r, reliability=share)

    def learn(self, scores: Tensor, *, accepted: float, tried: float) -> None:
        """Take a batch in.  scores: [2, n], each path's accepted and rejected score.  accepted of tried proposals."""
        if not scores.shape[1] or not tried:
            return
        a, r = scores.double().cpu()  # sync
        found = torch.stack([a.mean(), r.mean(), (a * r).mean(), (r * r).mean(), a.new_tensor(accepted / tried)])
        self._sums = self._keep * self._sums + (1 - self._keep) * found
        self._weight = self._keep * self._weight + (1 - self._keep)

    def state(self) -> Tensor:
        """[FIELDS + 1] float64."""
        return torch.cat([self._sums, self._sums.new_tensor([self._weight])])

    def load(self, state: Tensor) -> None:
        """Put back what `state` returned."""
        self._sums, self._weight = state[:FIELDS].clone(), float(state[FIELDS])
