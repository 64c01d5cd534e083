"""The objective is the formula that docs/papers.md gives, computed here by hand, word by word (K43)."""

import pytest
import torch

from fixtures_drafts import batch_of, random_rows, tiny_eagle3
from fixtures_models import make_target, tiny_llama
from paceline.training.objectives.ttt import TTT, TTTConfig
from paceline.training.sources import FrozenTarget
from paceline.training.unroll import unroll

STEPS, DECAY = 3, 0.8


@torch.no_grad()
@pytest.mark.parametrize("words", [None, 30])
def test_the_loss_is_the_documented_sum(words):
    target = make_target(tiny_llama())
    draft = tiny_eagle3(target, words=words)
    rows = random_rows(3)
    batch = batch_of(target, rows, taps=draft.taps)
    logits = target.head(batch.hidden).double()  # [B, T, V]
    vocab, view = draft.vocab.ids.tolist(), FrozenTarget(target)
    total, first, left_out = 0.0, 0, 0
    for step in unroll(draft, batch, view, steps=STEPS):
        said = draft.logits(step.hidden).double().log_softmax(dim=-1)  # [n, W]
        for place in range(len(said)):
            row, time = int(step.rows.batch[place]), int(step.rows.time[place])
            ids, prompt = rows[row]
            guessed = time + 2 + step.step  # fed the feature of `time` and token time + 1, then its own chain
            # Supervised: the first token that the chain is fed, and with it all that follow, are the answer's.
            if guessed >= len(ids) or time + 1 < prompt:
                continue
            first += step.step == 0
            law = logits[row, guessed - 1]
            if int(law.argmax()) not in vocab:
                left_out += 1
                continue
            inside = law[vocab].softmax(dim=-1)
            total -= DECAY**step.step * float((inside * said[place]).sum())
    terms = TTT(TTTConfig(steps=STEPS, decay=DECAY)).loss(draft, batch, view, step=0)
    assert float(terms.denominator) == first
    assert float(terms.numerator) == pytest.approx(total, rel=1e-5)
    assert (left_out > 0) == (words is not None)
