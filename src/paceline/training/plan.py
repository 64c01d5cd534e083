"""Which examples which process sees at which step: a pure function of the recipe, so that a resume needs one number.

A window is what one optimiser step averages over: `accumulation` micro-batches for each process.  Windows do not cross
epochs; the last one of an epoch may be smaller.  This policy file knows no tensors and no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import TrainingSection
from paceline.data.batching import padding_share, plan_epoch

Batches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """lengths: tokens of each training example.  world: number of processes."""

    lengths: tuple[int, ...]
    training: TrainingSection
    world: int = 1

    def epoch_batches(self, epoch: int) -> Batches:
        """Micro-batches of an epoch, each a tuple of example indices, in order."""
        training = self.training
        return plan_epoch(self.lengths, epoch=epoch, seed=training.seed, max_tokens=training.tokens_per_batch)

    @property
    def batches_per_epoch(self) -> int:
        """The same in every epoch."""
        return len(self.epoch_batches(0))

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of an epoch, the smaller last window included."""
        return math.ceil(self.batches_per_epoch / (self.training.accumulation * self.world))

    @property
    def steps(self) -> int:
        """Optimiser steps of the run."""
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.epochs is not None
        return math.ceil(self.training.epochs * self.steps_per_epoch)

    @property
    def padding(self) -> float:
        """Share of padding in the first epoch, in [0, 1)."""
        return padding_share(self.lengths, batches=self.epoch_batches(0))


class Windows:
    """Windows of a plan by step; the epoch in use is kept."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._per_epoch = plan.steps_per_epoch
        self._epoch, self._batches = 0, plan.epoch_batches(0)

    def epoch_of(self, step: int) -> int:
        """Epoch of an optimiser step, both counted from 0."""
        return step // self._per_epoch

    def at(self, step: int, *, rank: int) -> Batches:
        """Micro-batches of one process in the window of a step; none where the epoch has run out of them."""
        epoch, place = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._plan.epoch_batches(epoch)
        share, world = self._plan.training.accumulation, self._plan.world
        window = self._batches[place * share * world : (place + 1) * share * world]
        return window[rank::world]


def hold_out(digests: Sequence[str], *, at_most: int) -> set[str]:
    """Digests of the rows that validate when a recipe names no validation rows: a tenth of them, up to `at_most`.

    A pure function of the set of digests: the smallest ones.  Empty when a tenth is less than one.
    """
    distinct = sorted(set(digests))
    return set(distinct[: min(at_most, len(distinct) // 10)])
