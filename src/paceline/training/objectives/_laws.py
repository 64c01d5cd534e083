"""The target's law at every supervised position, over the words that a draft can say.

It knows no loss; the whole vocabulary's logits exist for a few rows at a time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.training.objectives._base import TargetView, TrainingBatch

HEAD_CHUNK = 512  # rows of target logits alive at once: 512 x 128k floats stay under 300 MB


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
