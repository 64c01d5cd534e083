"""DFlash's objective: hard cross-entropy of every slot behind an anchor, early slots counting more.

Anchors are drawn anew at each step; a slot is trained where every token up to its own belongs to one answer.  What a
slot counts for is an option: `even`, `decay` (z-lab/dflash), `dpace` or `auf` (see ops/slots.py).  The mean is always
over the sum of weights, so that neither gamma nor alpha changes the size of a step; the published code divides by
counts.  A sequential draft is trained alike, slot k being its step k - 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from paceline.drafts._base import BlockDraft, DraftNetwork
from paceline.errors import ConfigError
from paceline.ops import slots
from paceline.ops.fused_losses import head_label_losses
from paceline.records import LossTerms
from paceline.training.blocks import MOST_ROWS
from paceline.training.collate import PREDICT, supervised
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.paths import guided, refuse_steps
from paceline.training.unroll import UnrollStep

HEAD_CHUNK = 512  # rows of target logits alive at once


class DFlashObjectiveConfig(ObjectiveConfig):
    """How a block is trained.

    slots: tokens behind an anchor that are trained; absent = all that the draft's block says.  labels: `data`, the
    text's own token, or `target`, the target's likeliest one.  weights: what a slot counts for.  gamma: of `decay`.
    alpha: of `dpace`.  anchors: most anchors of a batch, for drafts that pay a block for each.
    """

    slots: int | None = Field(default=None, ge=1)
    labels: Literal["data", "target"] = "data"
    weights: Literal["even", "decay", "dpace", "auf"] = "decay"
    gamma: float = Field(default=7.0, gt=0)
    alpha: float = Field(default=0.5, ge=0, le=1)
    anchors: int = Field(default=MOST_ROWS, ge=1)


class DFlashObjective:
    """The objective; see the module's docstring.  count: slots that are trained."""

    def __init__(self, config: DFlashObjectiveConfig, *, count: int) -> None:
        self.config, self.count = config, count

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """Sum of weight times -log q(label); denominator: the sum of weights."""
        labels = self._labels(draft, batch, target)
        found = [
            _slot(draft, said, labels)
            for said in guided(draft, batch, target, steps=self.count, seed=step, most=self.config.anchors)
        ]
        losses, hits, active, known = (torch.stack(part, dim=1) for part in zip(*found, strict=True))  # [n, S]
        weights = self._weights((-losses).exp() * known, hits, active) * known
        metrics = {
            f"accuracy_{slot}": (hits[:, slot].sum().float(), active[:, slot].sum().float())
            for slot in range(self.count)
        }
        metrics["coverage"] = (known.sum().float(), active.sum().float())
        metrics["loss_0"] = (losses[:, 0].detach().sum(), known[:, 0].sum().float())
        return LossTerms((weights * losses).sum(), weights.sum(), metrics)

    def _labels(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView) -> Tensor:
        """[B, T] int64: the draft id to be said at each place, -1 for a word that the draft does not have."""
        if self.config.labels == "data":
            return draft.vocab.to_draft(batch.ids)
        return draft.vocab.to_draft(_choices(batch, target))

    def _weights(self, chance: Tensor, hits: Tensor, active: Tensor) -> Tensor:
        """[n, S] float32, without gradient."""
        config = self.config
        if config.weights == "decay":
            return slots.decaying(active, gamma=config.gamma)
        if config.weights == "dpace":
            return slots.pace(chance, active=active, alpha=config.alpha)
        return slots.until_failure(hits, active=active) if config.weights == "auf" else slots.even(active)


def _slot(draft: DraftNetwork, said: UnrollStep, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One slot of every row: losses [n] float32, and [n] bool hits, active, and active with a label."""
    wanted = said.rows.take(labels, ahead=PREDICT + said.step).masked_fill(~said.active, -1)
    losses, hits = head_label_losses(draft.head_input(said.hidden), weight=draft.head_weight, labels=wanted)
    return losses, hits, said.active, wanted >= 0


@torch.no_grad()
def _choices(batch: TrainingBatch, target: TargetView) -> Tensor:
    """The target's likeliest token at each place that some slot predicts, elsewhere the text's: [B, T] int64."""
    chosen = batch.ids.clone()
    rows, times = supervised(batch.mask, step=0).nonzero(as_tuple=True)
    for start in range(0, len(rows), HEAD_CHUNK):
        part = slice(start, start + HEAD_CHUNK)
        before = times[part] + PREDICT - 1  # the law of a token is at the place before it
        chosen[rows[part], before + 1] = target.head(batch.hidden[rows[part], before]).argmax(dim=-1)
    return chosen


def build(config: ObjectiveConfig, draft: object) -> DFlashObjective:
    """The objective for a draft with weights; others are refused."""
    assert isinstance(config, DFlashObjectiveConfig)
    if not isinstance(draft, DraftNetwork):
        raise ConfigError(f"objective dflash is defined for drafts with weights, not for {type(draft).__name__}")
    count = config.slots
    if count is None:
        if not isinstance(draft, BlockDraft):
            raise ConfigError(
                f"objective.options.slots is missing, and {type(draft).__name__} has no block that would say it; "
                "expected the number of tokens to train behind an anchor"
            )
        count = draft.block_size - 1
    refuse_steps(draft, steps=count, key="objective.options.slots")
    return DFlashObjective(config, count=count)


PLUGIN = ObjectivePlugin(config=DFlashObjectiveConfig, build=build)
