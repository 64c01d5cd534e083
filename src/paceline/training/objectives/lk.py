"""Losses of the acceptance itself: -log sum min(p, q), or a hybrid of KL and total variation, over unrolled steps.

What a drawn proposal is accepted with is sum min(p, q) = 1 - TV (Leviathan et al., arXiv 2211.17192).  Laws, mask and
step weights are those of `ttt`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError
from paceline.ops import path_rules
from paceline.ops.fused_losses import head_rule
from paceline.records import LossTerms
from paceline.training.collate import PREDICT
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.objectives._laws import target_laws
from paceline.training.paths import guided, refuse_steps


class LKConfig(ObjectiveConfig):
    """steps, decay: as in ttt.  loss: `alpha` is -log sum min(p, q); `hybrid` is w KL(p || q) + (1 - w) TV(p, q) with
    w = exp(-eta * sum min(p, q)) for each row."""

    steps: int = Field(default=7, ge=1)
    decay: float = Field(default=0.8, gt=0, le=1)
    loss: Literal["alpha", "hybrid"] = "hybrid"
    eta: float = Field(default=3.0, ge=0)


class LK:
    """The objective; see the module's docstring."""

    def __init__(self, config: LKConfig) -> None:
        self.config = config

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """Sum over steps of decay^j times the losses; denominator: supervised rows of step 0."""
        laws = target_laws(draft, batch, target)
        numerator = denominator = batch.taps.new_zeros((), dtype=torch.float32)
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        for one in guided(draft, batch, target, steps=self.config.steps, seed=step):
            place = one.rows.take(laws.index, ahead=PREDICT - 1 + one.step)[one.active]
            best, count = laws.best[place], one.active.sum().float()
            known = (best >= 0).nonzero().flatten()
            head_input = draft.head_input(one.hidden[one.active][known])
            rule = _Rule(self.config, laws.law, place[known], best[known])
            total = head_rule(head_input, weight=draft.head_weight, rule=rule)
            numerator = numerator + self.config.decay**one.step * total
            metrics[f"accuracy_{one.step}"] = (rule.hits, count)
            if one.step == 0:
                denominator = count
        return LossTerms(numerator, denominator, metrics)


class _Rule:
    """Losses of the rows whose laws stand at `place`.  hits: how many have their largest logit at `best`."""

    def __init__(self, config: LKConfig, law: Tensor, place: Tensor, best: Tensor) -> None:
        self.config, self.law, self.place, self.best = config, law, place, best
        self.hits = law.new_zeros(())

    def __call__(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        chosen = logits.gather(1, self.best[part, None])[:, 0]
        self.hits += (chosen >= logits.amax(dim=-1)).sum()
        log_q, p = logits.log_softmax(dim=-1), self.law[self.place[part]]
        if self.config.loss == "alpha":
            return path_rules.acceptance(log_q, p=p)
        return path_rules.acceptance_hybrid(log_q, p=p, eta=self.config.eta)


def build(config: ObjectiveConfig, draft: object) -> LK:
    """The objective for a draft with weights; others are refused."""
    assert isinstance(config, LKConfig)
    if not isinstance(draft, DraftNetwork):
        raise ConfigError(f"objective lk is defined for drafts with weights, not for {type(draft).__name__}")
    refuse_steps(draft, steps=config.steps, key="objective.options.steps")
    return LK(config)


PLUGIN = ObjectivePlugin(config=LKConfig, build=build)
