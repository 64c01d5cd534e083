"""EAGLE-1's losses and HASS's top-K distillation over aligned passes, for drafts that guess the target's next feature.

Pass n is step n of the training-time unroll, fed features that carry no gradient: every pass is trained for itself, and
one backward of the sum is what the published code does pass by pass.  Which rows a pass trains is its caller's word.

Deviations, on purpose: masked scores are -inf (the published code writes 0, and trains on attention that decoding does
not have), the mask is that of the predicted token, a row of any pass weighs the same (published: every pass is averaged
for itself), and rows whose target argmax a reduced vocabulary lacks are regressed but taught no word.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from paceline.drafts._feature import FeatureDraft
from paceline.errors import ConfigError
from paceline.ops.fused_losses import head_cross_entropy
from paceline.ops.losses import emphasised, smooth_l1
from paceline.records import LossTerms
from paceline.training.collate import FEED, PREDICT
from paceline.training.objectives._base import ObjectiveConfig, TargetView, TrainingBatch
from paceline.training.objectives._laws import HEAD_CHUNK, TargetLaws, target_laws
from paceline.training.unroll import UnrollStep, unroll

Narrow = Callable[[FeatureDraft, TrainingBatch, UnrollStep, Tensor], Tensor]
"""(draft, batch, a pass, rows that it trained [n] bool) -> rows that the next pass may train [n] bool."""


class PassesConfig(ObjectiveConfig):
    """passes: how often the draft is fed its own features, and once the target's.  The others weigh the losses.

    regression: smooth L1 to the target's feature.  cross_entropy: to the target's law.  distillation: top-K
    distillation.  distilled: K.
    """

    passes: int = Field(default=3, ge=1)
    regression: float = Field(default=1.0, ge=0)
    cross_entropy: float = Field(default=0.1, ge=0)
    distillation: float = Field(default=1.0, ge=0)
    distilled: int = Field(default=10, ge=1)


def feature_draft(draft: object, *, name: str) -> FeatureDraft:
    """The draft, if the objective `name` is defined for it.  Raises ConfigError, saying why it is not."""
    if isinstance(draft, FeatureDraft):
        return draft
    raise ConfigError(
        f"objective {name} trains a guess of the target's last hidden state; {type(draft).__name__} makes none (what "
        "it hands on is its own): use a draft such as eagle2 or griffin, or the objective ttt"
    )


class Passes:
    """The losses of all passes.  narrow: which rows go on to the next pass; None keeps all."""

    def __init__(self, config: PassesConfig, *, narrow: Narrow | None = None) -> None:
        self.config, self._narrow = config, narrow

    def loss(self, draft: FeatureDraft, batch: TrainingBatch, target: TargetView) -> LossTerms:
        """Sum over passes and trained rows; denominator: supervised rows of the first pass."""
        laws = target_laws(draft, batch, target)
        mass = self._emphasise(laws)
        numerator = batch.taps.new_zeros((), dtype=torch.float32)
        denominator = numerator
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        kept: Tensor | None = None
        for unrolled in unroll(draft, batch, target, steps=self.config.passes, is_chained=False):
            active, number = unrolled.active, unrolled.step
            trained = active if kept is None else active & kept
            count = active.sum().float()
            words, known = self._words(draft, unrolled, laws=laws, mass=mass, trained=trained, metrics=metrics)
            regression = self._regression(draft, batch, unrolled, trained)
            numerator = numerator + words + self.config.regression * regression.sum()
            metrics[f"regression_{number}"] = (regression.detach().sum(), trained.sum().float())
            if number == 0:
                denominator = count
                metrics["coverage"] = (known.sum(), count)
            if self._narrow is not None:
                metrics[f"trained_{number}"] = (trained.sum().float(), count)
                if number + 1 < self.config.passes:
                    kept = self._narrow(draft, batch, unrolled, trained)
        return LossTerms(numerator, denominator, metrics)

    def _emphasise(self, laws: TargetLaws) -> Tensor:
        """Both cross-entropies as one: the laws are changed in place; returns the mass of each, [m] float32."""
        mass = laws.law.new_empty(len(laws.law))
        for start in range(0, len(mass), HEAD_CHUNK):
            part = slice(start, start + HEAD_CHUNK)
            laws.law[part], mass[part] = emphasised(
                laws.law[part],
                count=self.config.distilled,
                share=self.config.cross_entropy,
                top_share=self.config.distillation,
            )
        return mass

    def _words(
        self, draft: FeatureDraft, unrolled: UnrollStep, *, laws: TargetLaws, mass: Tensor, trained: Tensor,
        metrics: dict[str, tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(weighted cross-entropies of the trained rows, whether an active row's best word can be said: [m] float).

        Accuracy is over all active rows, as in every objective, trained or not.
        """
        active, number = unrolled.active, unrolled.step
        place = unrolled.rows.take(laws.index, ahead=PREDICT - 1 + number)[active]
        best = laws.best[place]
        known = (best >= 0).float()
        total, _, hits = head_cross_entropy(
            draft.head_input(unrolled.hidden[active]),
            weight=draft.head_weight,
            laws=laws.law,
            place=place,
            row_weights=known * trained[active] * mass[place],
            labels=best,
        )
        metrics[f"accuracy_{number}"] = (hits.sum().float(), active.sum().float())
        return total, known

    def _regression(self, draft: FeatureDraft, batch: TrainingBatch, unrolled: UnrollStep, trained: Tensor) -> Tensor:
        """Smooth L1 of each trained row's guess of the feature at the position that it was fed, [n trained]."""
        feature = unrolled.rows.take(batch.hidden, ahead=FEED + unrolled.step)[trained]
        return smooth_l1(draft.onward(unrolled.hidden[trained]), target=feature)
