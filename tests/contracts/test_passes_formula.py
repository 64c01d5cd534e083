"""hass and griffin are the sums that docs/papers.md gives, computed here by hand, row by row and word by word (K43)."""

import pytest
import torch

from fixtures_drafts import FEATURE, batch_of, random_rows, tiny_draft
from fixtures_models import make_target, tiny_llama
from paceline.errors import ConfigError
from paceline.ops import losses
from paceline.training.objectives import griffin, hass
from paceline.training.sources import FrozenTarget
from paceline.training.unroll import unroll

PASSES = 3
BUILD = {
    "hass": (hass.build, hass.HassConfig(distilled=4)),
    "griffin": (griffin.build, griffin.GriffinConfig(distilled=4, aligned=20)),
}


def smooth(guess, feature):
    total = 0.0
    for one, two in zip(guess.tolist(), feature.tolist(), strict=True):
        gap = abs(one - two)
        total += 0.5 * gap * gap if gap < 1 else gap - 0.5
    return total / len(guess)


def words_loss(law, said, config):
    """0.1 of the soft cross-entropy, and the weight of distillation times that over the likeliest words alone."""
    terms = [-float(p * log_q) for p, log_q in zip(law, said, strict=True)]
    likeliest = sorted(range(len(law)), key=lambda word: -float(law[word]))[: config.distilled]
    return config.cross_entropy * sum(terms) + config.distillation * sum(terms[word] for word in likeliest)


@torch.no_grad()
@pytest.mark.parametrize("words", [None, 30])
@pytest.mark.parametrize("objective", BUILD)
@pytest.mark.parametrize("name", FEATURE)
def test_the_loss_is_the_documented_sum(name, objective, words):
    target = make_target(tiny_llama())
    draft = tiny_draft(name, target, words=words)
    rows = random_rows(3)
    batch = batch_of(target, rows, taps=draft.taps)
    build, config = BUILD[objective]
    logits = target.head(batch.hidden).double()
    vocab, view = draft.vocab.ids.tolist(), FrozenTarget(target)
    total, first, left_out, dropped = 0.0, 0, 0, set()
    trained = [0] * PASSES
    for step in unroll(draft, batch, view, steps=PASSES):
        scores = draft.logits(step.hidden).double()
        for place in range(len(scores)):
            row, time = int(step.rows.batch[place]), int(step.rows.time[place])
            ids, prompt = rows[row]
            guessed = time + 2 + step.step
            if guessed >= len(ids) or time + 1 < prompt:
                continue
            first += step.step == 0
            if (row, time) in dropped:
                continue
            trained[step.step] += 1
            # The guess of the feature at the position just fed, whose head says the guessed word.
            total += config.regression * smooth(draft.onward(step.hidden[place]), batch.hidden[row, guessed - 1])
            said, law = scores[place].log_softmax(dim=-1), logits[row, guessed - 1]
            if int(law.argmax()) in vocab:
                total += words_loss(law[vocab].softmax(dim=-1), said, config)
            else:
                left_out += 1
            best = [vocab[word] for word in said.argsort(descending=True)[:20].tolist()]
            if objective == "griffin" and ids[guessed] not in best:
                dropped.add((row, time))  # decoding would have left this chain here
    terms = build(config, draft).loss(draft, batch, view, step=0)
    assert float(terms.denominator) == first
    assert float(terms.numerator) == pytest.approx(total, rel=1e-5)
    assert (left_out > 0) == (words is not None)
    if objective == "griffin":
        assert [int(terms.metrics[f"trained_{number}"][0]) for number in range(PASSES)] == trained
        assert 0 < trained[1] < float(terms.metrics["accuracy_1"][1])  # some chains go on and some do not


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_pass_is_trained_for_itself(is_chained):
    target = make_target(tiny_llama())
    draft = tiny_draft("eagle2", target)
    batch = batch_of(target, random_rows(2), taps=draft.taps)
    steps = list(unroll(draft, batch, FrozenTarget(target), steps=3, is_chained=is_chained))
    (found,) = torch.autograd.grad(steps[2].hidden.sum(), steps[1].hidden, allow_unused=True)
    assert (found is not None) == is_chained
    assert all(torch.isfinite(step.hidden).all() for step in steps)


@pytest.mark.parametrize("objective", BUILD)
@pytest.mark.parametrize("name", FEATURE)
def test_every_weight_is_taught_and_the_head_is_not(name, objective):
    target = make_target(tiny_llama())
    draft = tiny_draft(name, target)
    batch = batch_of(target, random_rows(3), taps=draft.taps)
    build, config = BUILD[objective]
    build(config, draft).loss(draft, batch, FrozenTarget(target), step=0).numerator.backward()
    assert not [key for key, weight in draft.named_parameters() if weight.grad is None or not weight.grad.abs().max()]
    assert draft.head_weight.grad is None and target.head_weight.grad is None


@pytest.mark.parametrize("objective", BUILD)
def test_a_draft_that_guesses_no_feature_is_refused_by_name(objective):
    build, config = BUILD[objective]
    with pytest.raises(ConfigError, match=f"objective {objective} trains a guess .* Eagle3 makes none .* eagle2"):
        build(config, tiny_draft("eagle3", make_target(tiny_llama())))


@pytest.mark.parametrize("name", FEATURE)
def test_the_gradient_is_that_of_passes_on_given_features(name):
    target = make_target(tiny_llama())
    draft = tiny_draft(name, target)
    batch, view = batch_of(target, random_rows(3), taps=draft.taps), FrozenTarget(target)
    laws = target.head(batch.hidden).softmax(dim=-1)

    def by_hand(is_chained):
        total = torch.zeros(())
        for step in unroll(draft, batch, view, steps=PASSES, is_chained=is_chained):
            rows, active = step.rows, step.active
            features = rows.take(batch.hidden, ahead=1 + step.step)[active]
            p = rows.take(laws, ahead=1 + step.step)[active]
            hidden = step.hidden[active]
            total = total + losses.smooth_l1(draft.onward(hidden), target=features).sum()
            total = total + 0.1 * losses.soft_cross_entropy(draft.logits(hidden), target=p).sum()
            total = total + losses.top_cross_entropy(draft.logits(hidden), target=p, count=10).sum()
        return torch.autograd.grad(total, list(draft.parameters()))

    terms = hass.build(hass.HassConfig(), draft).loss(draft, batch, view, step=0)
    found = torch.autograd.grad(terms.numerator, list(draft.parameters()))
    for one, two in zip(found, by_hand(False), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert any(not torch.allclose(one, two, rtol=1e-2) for one, two in zip(found, by_hand(True), strict=True))
