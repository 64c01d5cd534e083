"""EAGLE-3's training-time test: soft cross-entropy to the target's law over several unrolled steps.

Step weight 0.8^j, law restricted to the draft vocabulary and renormalised, rows whose target argmax lies outside it
masked (Li et al., EAGLE-3, arXiv 2503.01840).  Deviations, both on purpose: the mask is that of the predicted token,
and the mean is over supervised rows, not over all positions of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError
from paceline.ops.fused_losses import head_cross_entropy
from paceline.records import LossTerms
from paceline.training.collate import PREDICT
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.objectives._laws import target_laws
from paceline.training.paths import guided, refuse_steps


class TTTConfig(ObjectiveConfig):
    """steps: unrolled steps (7 in the paper).  decay: weight of step j is decay^j."""

    steps: int = 7
    decay: float = 0.8


class TTT:
    """The objective; see the module's docstring."""

    def __init__(self, config: TTTConfig) -> None:
        self.config = config

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """Sum over steps of decay^j times the cross-entropies; denominator: supervised rows of step 0."""
        laws = target_laws(draft, batch, target)
        numerator = batch.taps.new_zeros((), dtype=torch.float32)
        denominator = numerator
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        for unrolled in guided(draft, batch, target, steps=self.config.steps, seed=step):
            active, number = unrolled.active, unrolled.step
            place = unrolled.rows.take(laws.index, ahead=PREDICT - 1 + number)[active]
            best = laws.best[place]
            known = (best >= 0).float()
            total, losses, hits = head_cross_entropy(
                draft.head_input(unrolled.hidden[active]),
                weight=draft.head_weight,
                laws=laws.law,
                place=place,
                row_weights=known,
                labels=best,
            )
            numerator = numerator + self.config.decay**number * total
            count = active.sum().float()
            metrics[f"accuracy_{number}"] = (hits.sum().float(), count)
            if number == 0:
                denominator = count
                metrics["coverage"] = (known.sum(), count)
                metrics["loss_0"] = ((losses * known).sum(), known.sum())
        return LossTerms(numerator, denominator, metrics)


def build(config: ObjectiveConfig, draft: object) -> TTT:
    """The objective for a draft with weights; others are refused."""
    assert isinstance(config, TTTConfig)
    if not isinstance(draft, DraftNetwork):
        raise ConfigError(f"objective ttt is defined for drafts with weights, not for {type(draft).__name__}")
    if config.steps < 1 or not 0 < config.decay <= 1:
        raise ConfigError(f"ttt: steps must be at least 1 and decay in (0, 1], found {config.steps} and {config.decay}")
    refuse_steps(draft, steps=config.steps, key="objective.options.steps")
    return TTT(config)


PLUGIN = ObjectivePlugin(config=TTTConfig, build=build)
