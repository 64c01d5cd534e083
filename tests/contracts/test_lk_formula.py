"""`lk` is the formula that docs/papers.md gives, computed here by hand, row by row (K43)."""

from math import exp

import pytest
import torch

from fixtures_drafts import batch_of, random_rows, tiny_eagle3
from fixtures_models import make_target, tiny_llama
from paceline.drafts import ngram
from paceline.errors import ConfigError
from paceline.training.objectives import lk
from paceline.training.objectives.lk import LK, LKConfig
from paceline.training.sources import FrozenTarget
from paceline.training.unroll import unroll

STEPS, DECAY, ETA = 3, 0.7, 2.0


@pytest.mark.parametrize("words", [None, 30])
@pytest.mark.parametrize("loss", ["alpha", "hybrid"])
def test_the_loss_is_the_documented_sum(words, loss):
    target = make_target(tiny_llama())
    draft, rows = tiny_eagle3(target, words=words), random_rows(3)
    batch, view = batch_of(target, rows, taps=draft.taps), FrozenTarget(target)
    logits, vocab, total, first = target.head(batch.hidden).detach().double(), draft.vocab.ids.tolist(), 0.0, 0
    for step in unroll(draft, batch, view, steps=STEPS):
        said = draft.logits(step.hidden).detach().double().softmax(dim=-1)
        for place in range(len(said)):
            row, time = int(step.rows.batch[place]), int(step.rows.time[place])
            ids, prompt = rows[row]
            guessed = time + 2 + step.step
            if guessed >= len(ids) or time + 1 < prompt:
                continue
            first += step.step == 0
            law = logits[row, guessed - 1]
            if int(law.argmax()) not in vocab:
                continue
            p, q = law[vocab].softmax(dim=-1), said[place]
            alpha = float(torch.minimum(p, q).sum())
            far, near = float((p * (p / q).log()).sum()), 0.5 * float((p - q).abs().sum())
            mixed = exp(-ETA * alpha) * far + (1 - exp(-ETA * alpha)) * near
            total += DECAY**step.step * (-torch.tensor(alpha).log().item() if loss == "alpha" else mixed)
    terms = LK(LKConfig(steps=STEPS, decay=DECAY, loss=loss, eta=ETA)).loss(draft, batch, view, step=0)
    assert float(terms.denominator) == first
    assert float(terms.numerator.detach()) == pytest.approx(total, rel=1e-5)


def test_a_draft_without_weights_is_refused_by_name():
    with pytest.raises(ConfigError, match="lk is defined for drafts with weights, not for Ngram"):
        lk.build(LKConfig(), ngram.Ngram(ngram.NgramConfig()))
