"""Acceptance 43: the block objective against its formula, written out number by number."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures_blocks import tiny_dflash
from fixtures_drafts import batch_of, random_rows, tiny_eagle3
from fixtures_models import make_target, tiny_llama
from paceline.decoding.binding import Draft
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import ConfigError
from paceline.training.objectives import dflash
from paceline.training.objectives.dflash import DFlashObjective, DFlashObjectiveConfig
from paceline.training.paths import guided
from paceline.training.sources import FrozenTarget

CHANCES = [0.6, 0.25, 0.1]  # q of the label in the three slots


def by_hand(monkeypatch: pytest.MonkeyPatch, **options: Any) -> float:
    """Loss of one anchor with three slots whose laws are CHANCES for the labels, by the production objective."""
    laws = [[0.6, 0.3, 0.1], [0.7, 0.25, 0.05], [0.45, 0.45, 0.1]]  # the labels are 0, 1, 2
    said = [
        SimpleNamespace(
            step=step,
            rows=SimpleNamespace(take=lambda labels, ahead: labels[0, ahead : ahead + 1]),
            hidden=torch.tensor([law]).log(),
            active=torch.tensor([True]),
        )
        for step, law in enumerate(laws)
    ]
    monkeypatch.setattr(dflash, "guided", lambda *_arguments, **_options: iter(said))
    draft = SimpleNamespace(
        head_input=lambda hidden: hidden, head_weight=torch.eye(3), vocab=SimpleNamespace(to_draft=lambda ids: ids)
    )
    batch = SimpleNamespace(ids=torch.tensor([[9, 9, 0, 1, 2]]))
    objective = DFlashObjective(DFlashObjectiveConfig(**options), count=3)
    terms = objective.loss(draft, batch, None, step=0)  # type: ignore[arg-type]
    return float(terms.numerator / terms.denominator)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"weights": "even"}, [1.0, 1.0, 1.0]),
        ({"weights": "decay", "gamma": 4.0}, [1.0, math.exp(-0.25), math.exp(-0.5)]),
        # s = 0.8, 0.625, 0.55: P = 0.8, 0.5, 0.275
        ({"weights": "dpace", "alpha": 0.5}, [0.8 + 0.5 + 0.275, 0.5 + 0.275, 0.275]),
        ({"weights": "auf"}, [1.0, 1.0, 0.0]),  # the second slot is the first wrong one
    ],
    ids=lambda value: value.get("weights") if isinstance(value, dict) else "",
)
def test_three_tokens_by_hand(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], weights: list[float]) -> None:
    expected = sum(weight * -math.log(chance) for weight, chance in zip(weights, CHANCES, strict=True)) / sum(weights)
    assert by_hand(monkeypatch, **options) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("words", [None, 30])
@pytest.mark.parametrize("labels", ["data", "target"])
@pytest.mark.parametrize("weights", ["even", "decay", "dpace", "auf"])
@pytest.mark.parametrize("kind", ["block", "sequential"])
def test_the_loss_is_the_documented_sum(kind: str, weights: str, labels: str, words: int | None) -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target, words=words, block=4) if kind == "block" else tiny_eagle3(target, words=words)
    rows = random_rows(3)
    batch, view = batch_of(target, rows, taps=draft.taps), FrozenTarget(target)
    choices = target.head(batch.hidden).argmax(dim=-1)
    steps = list(guided(draft, batch, view, steps=3))
    vocab = draft.vocab.ids.tolist()
    top, bottom, left_out = 0.0, 0.0, 0
    for place in range(len(steps[0].hidden)):
        row, time = int(steps[0].rows.batch[place]), int(steps[0].rows.time[place])
        ids, _prompt = rows[row]
        losses, hits, known = [], [], []
        for step in steps:
            at = time + 2 + step.step
            if at >= len(ids):
                break
            label = ids[at] if labels == "data" else int(choices[row, at - 1])
            law = draft.logits(step.hidden[place]).double().softmax(dim=-1)
            known.append(label in vocab)
            losses.append(-math.log(float(law[vocab.index(label)])) if known[-1] else 0.0)
            hits.append(known[-1] and int(law.argmax()) == vocab.index(label))
        left_out += known.count(False)
        chances = [math.exp(-loss) if one else 0.0 for loss, one in zip(losses, known, strict=True)]
        survival = [math.prod(0.5 * chance + 0.5 for chance in chances[: k + 1]) for k in range(len(chances))]
        for k, loss in enumerate(losses):
            weight = {
                "even": 1.0,
                "decay": math.exp(-k / 7.0),
                "dpace": sum(survival[k:]),
                "auf": float(all(hits[:k])),
            }[weights]
            top += weight * loss * known[k]
            bottom += weight * known[k]
    config = DFlashObjectiveConfig(weights=weights, labels=labels, slots=3)  # type: ignore[arg-type]
    terms = dflash.build(config, draft).loss(draft, batch, view, step=0)
    assert float(terms.denominator) == pytest.approx(bottom, rel=1e-5)
    assert float(terms.numerator) == pytest.approx(top, rel=1e-4)
    assert (left_out > 0) == (words is not None)
    covered, active = terms.metrics["coverage"]
    assert float(active - covered) == left_out


def test_all_slots_of_a_block_unless_fewer_are_named() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target, block=5)
    assert dflash.build(DFlashObjectiveConfig(), draft).count == 4
    assert dflash.build(DFlashObjectiveConfig(slots=2), draft).count == 2
    with pytest.raises(ConfigError, match=r"slots is 5; a block of 5 says 4 tokens"):
        dflash.build(DFlashObjectiveConfig(slots=5), draft)


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (lambda: tiny_eagle3(make_target(tiny_llama())), "objective.options.slots is missing, and Eagle3 has no block"),
        (lambda: Ngram(NgramConfig()), "defined for drafts with weights, not for Ngram"),
    ],
)
def test_a_draft_it_is_not_defined_for(draft: Any, said: str) -> None:
    made: Draft = draft()
    with pytest.raises(ConfigError, match=said):
        dflash.build(DFlashObjectiveConfig(), made)


@torch.no_grad()
def test_anchors_are_drawn_anew_at_each_step() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target)
    batch, view = batch_of(target, random_rows(4), taps=draft.taps), FrozenTarget(target)
    objective = dflash.build(DFlashObjectiveConfig(anchors=4, weights="even", slots=1), draft)
    terms = [objective.loss(draft, batch, view, step=step) for step in (0, 0, 1, 2)]
    assert {float(found.denominator) for found in terms} == {4.0}
    values = [float(found.numerator) for found in terms]
    assert values[0] == values[1] and len(set(values)) == 3
