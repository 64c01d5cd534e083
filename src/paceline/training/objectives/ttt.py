"""EAGLE-3's training-time test: soft cross-entropy to the target's law over several unrolled steps.

Step weight 0.8^j, law restricted to the draft vocabulary and renormalised, rows whose target argmax lies outside it
masked (Li et al., EAGLE-3, arXiv 2503.01840).  Deviations, both on purpose: the mask is that of the predicted token,
and the mean is over supervised rows, not over all positions of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError
from paceline.ops.fused_losses import head_cross_entropy
from paceline.records import LossTerms
from paceline.training.collate import PREDICT
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.paths import guided, refuse_steps

HEAD_CHUNK = 512  # rows of target logits alive at once: 512 x 128k floats stay under 300 MB


class TTTConfig(ObjectiveConfig):
    """steps: unrolled steps (7 in the paper).  decay: weight of step j is decay^j."""

    steps: int = 7
    decay: float = 0.8


@dataclass(frozen=True, slots=True)
class TargetLaws:
    """The target's next-token law at every supervised position, over the draft vocabulary.

    index: [B, T] int64, where a position's law lies (-1 = none).  law: [m, W] float32, renormalised.
    best: [m] int64 draft id of the target's argmax over its whole vocabulary, -1 if outside.
    """

    index: Tensor
    law: Tensor
    best: Tensor


@torch.no_grad()
def target_laws(draft: DraftNetwork, batch: TrainingBatch, target: TargetView) -> TargetLaws:
    """Laws of the tokens that some step predicts; full-vocabulary logits exist only a chunk at a time."""
    predicted = batch.mask.clone()
    predicted[:, :1] = False  # the first token has no law
    wanted = torch.zeros_like(predicted)
    wanted[:, :-1] = predicted[:, 1:]  # the law of token s + 1 is at s
    rows, times = wanted.nonzero(as_tuple=True)
    index = torch.full(batch.ids.shape, -1, dtype=torch.int64, device=batch.ids.device)
    index[rows, times] = torch.arange(len(rows), device=index.device)
    vocab = draft.vocab
    laws = torch.empty(len(rows), vocab.size, dtype=torch.float32, device=index.device)
    best = torch.empty(len(rows), dtype=torch.int64, device=index.device)
    for start in range(0, len(rows), HEAD_CHUNK):
        part = slice(start, start + HEAD_CHUNK)
        logits = target.head(batch.hidden[rows[part], times[part]])
        inside = vocab.restrict(logits).float()
        laws[part] = inside.softmax(dim=-1)
        # The argmax is inside exactly when the largest logit is; a maximum is several times cheaper than an argmax.
        highest, place = inside.max(dim=-1)
        best[part] = place.masked_fill(highest < logits.amax(dim=-1).float(), -1)
    return TargetLaws(index, laws, best)


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
