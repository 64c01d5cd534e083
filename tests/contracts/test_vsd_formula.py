"""VSD is the formula that docs/papers.md gives, computed here by hand, path by path (K43), and its estimators agree."""

from __future__ import annotations

from math import log

import pytest
import torch

from fixtures_drafts import batch_of, tiny_eagle3
from fixtures_models import make_target, tiny_llama
from paceline.config import parse_section
from paceline.drafts import ngram
from paceline.errors import ConfigError
from paceline.training.objectives import vsd
from paceline.training.objectives.ttt import TTT, TTTConfig
from paceline.training.objectives.vsd import VSD, VSDConfig
from paceline.training.sources import FrozenTarget
from paceline.training.unroll import unroll

STEPS = 3
TARGET = make_target(tiny_llama())


def greedy_rows(count: int = 3, *, break_at: int | None = None) -> list[tuple[list[int], int]]:
    """Texts that the target wrote greedily behind a few ids; `break_at`: where it takes its second choice instead."""
    rows = []
    for start in range(count):
        ids = [start + 1, 2 * start + 5, 7]
        for place in range(7):
            scores = TARGET.model(torch.tensor([ids])).logits[0, -1].detach()
            ids.append(int(scores.topk(2).indices[1 if place == break_at else 0]))
        rows.append((ids, 3))
    return rows


def draft_and_batch(rows, *, words=None):
    draft = tiny_eagle3(TARGET, words=words, scale=0.25)
    return draft, batch_of(TARGET, rows, taps=draft.taps), FrozenTarget(TARGET)


def laws_by_row(draft, batch, view, rows):
    """{(row, time): (oracle ids, draft laws, target laws)} by depth, for as far as the answer goes."""
    target_logits = TARGET.head(batch.hidden).detach().double()
    inside = draft.vocab.ids.tolist()
    found = {}
    for step in unroll(draft, batch, view, steps=STEPS):
        said = draft.logits(step.hidden).detach().double().softmax(dim=-1)
        for place in range(len(said)):
            row, time = int(step.rows.batch[place]), int(step.rows.time[place])
            ids, prompt = rows[row]
            guessed = time + 2 + step.step
            if guessed >= len(ids) or time + 1 < prompt:
                continue
            law = target_logits[row, guessed - 1]
            depths = found.setdefault((row, time), [])
            depths.append((ids[guessed], int(law.argmax()), said[place], law[inside].softmax(dim=-1)))
    return found, inside


def by_hand(found, inside, *, config: VSDConfig) -> float:
    """Sum over rows of all terms, c = 1."""
    total = 0.0
    for depths in found.values():
        alive = 1.0
        for text, best, q, own in depths:
            token = best if config.temperature == 0 else text
            if best not in inside:
                break
            p = torch.zeros_like(own)
            if config.temperature == 0:
                p[inside.index(best)] = 1.0
            else:
                p = (own.log() / config.temperature).softmax(dim=-1)
            kept, corrected, refused = torch.minimum(p, q), (p - q).clamp_min(0), (q - p).clamp_min(0)
            sure = float((refused * q).sum() / refused.sum())
            aim = kept + corrected * (1 + config.confidence * sure)
            total -= alive * float((aim * q.log()).sum())
            total -= alive * config.car * float((refused * q**config.gamma * (1 - q).log()).sum())
            if config.kl == "reverse":
                total += alive * config.beta * float((q * (q.log() - own.log())).sum())
            else:
                total -= alive * config.beta * float((own * q.log()).sum())
            if token not in inside or (config.temperature == 0 and text != best):
                break
            place = inside.index(token)
            chance = min(1.0, float(q[place] / p[place]))
            alive *= config.floor + (1 - config.floor) * chance
    return total


@pytest.mark.parametrize("words", [None, 30])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "confidence": 0.0},
        {"car": 0.7, "gamma": 2.0, "beta": 0.3},
        {"beta": 1.0, "kl": "forward", "car": 0.0},
        {"floor": 0.4, "confidence": 3.0},
    ],
)
def test_the_loss_is_the_documented_sum(words, options):
    rows = greedy_rows(break_at=3)  # its third row of tokens leaves the oracle
    draft, batch, view = draft_and_batch(rows, words=words)
    config = VSDConfig(steps=STEPS, arw=False, **options)
    terms = VSD(config).loss(draft, batch, view, step=0)
    found, inside = laws_by_row(draft, batch, view, rows)
    assert float(terms.denominator) == len(found)
    assert float(terms.numerator.detach()) == pytest.approx(by_hand(found, inside, config=config), rel=1e-4)


def test_three_tokens_by_hand():
    """One row, depths with q(oracle) = 1/2, 1/4, 1/5 of a greedy oracle: -[log 1/2 + 1/2 log 1/4 + 1/8 log 1/5]."""
    from paceline.ops.paths import reached

    chance = torch.tensor([[0.5], [0.25], [0.2]], dtype=torch.float64)
    alive, _ = reached(chance, goes_on=torch.ones(3, 1, dtype=torch.bool))
    assert -float((alive * chance.log()).sum()) == pytest.approx(-(log(0.5) + 0.5 * log(0.25) + 0.125 * log(0.2)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_converges_to_expected_as_proposals_grow(temperature):
    rows = greedy_rows()
    draft, batch, view = draft_and_batch(rows)
    # At T > 0 `expected` also averages over the target's own token; at depth 0 of one row that is all the difference.
    options = {"steps": STEPS, "arw": False, "temperature": temperature, "confidence": 0.0}
    options |= {"steps": 1, "car": 1.0} if temperature else {"car": 1.0}
    exact = float(VSD(VSDConfig(estimator="expected", **options)).loss(draft, batch, view, step=0).numerator.detach())
    if temperature:
        exact = one_step_given_the_text(draft, batch, view, rows)
    errors = {}
    for proposals in (4, 64, 1024):
        objective = VSD(VSDConfig(estimator="sampled", proposals=proposals, **options))
        found = [float(objective.loss(draft, batch, view, step=step).numerator.detach()) for step in range(6)]
        errors[proposals] = sum(abs(value / exact - 1) for value in found) / len(found)
    assert errors[1024] < 0.01
    assert errors[1024] < errors[64] < errors[4]


def one_step_given_the_text(draft, batch, view, rows) -> float:
    """-log q(x) whether x was proposed or corrected, and CAR over (q - p)+ when it was refused."""
    found, _ = laws_by_row(draft, batch, view, rows)
    total = 0.0
    for ((text, _best, q, p),) in [depths[:1] for depths in found.values()]:
        refused = (q - p).clamp_min(0)
        rejected = 1 - min(1.0, float(q[text] / p[text]))
        hard = float((refused * q * -(1 - q).log()).sum() / refused.sum())
        total += -float(q[text].log()) + rejected * hard
    return total


def test_draws_are_a_function_of_step_and_rows():
    rows = greedy_rows()
    draft, batch, view = draft_and_batch(rows)
    objective = VSD(VSDConfig(estimator="sampled", arw=False, steps=STEPS))
    once, again = (float(objective.loss(draft, batch, view, step=5).numerator.detach()) for _ in range(2))
    assert once == again
    assert once != float(objective.loss(draft, batch, view, step=6).numerator.detach())


def gradient(draft, terms) -> torch.Tensor:
    grads = torch.autograd.grad(terms.numerator / terms.denominator, list(draft.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def teach(draft, batch, view, *, steps: int) -> None:
    """A few steps of ttt: a draft that is right about half of the time."""
    optimiser = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for step in range(steps):
        terms = TTT(TTTConfig(steps=STEPS)).loss(draft, batch, view, step=step)
        optimiser.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimiser.step()


def test_adaptive_rejection_weighting_lowers_the_variance_of_the_gradient():
    draft, batch, view = draft_and_batch(greedy_rows(6))
    teach(draft, batch, view, steps=90)
    spread = {}
    for arw in (False, True):
        objective = VSD(VSDConfig(estimator="sampled", proposals=4, steps=STEPS, arw=arw, memory=5.0))
        for step in range(20):  # it learns c first
            terms = objective.loss(draft, batch, view, step=step)
        value = float(terms.metrics["rejection_weight"][0] / terms.metrics["rejection_weight"][1])
        terms = [objective.loss(draft, batch, view, step=step) for step in range(100, 140)]
        found = torch.stack([gradient(draft, one) for one in terms])
        spread[arw] = float(found.var(dim=0).sum())
        assert 0 < value < 1 if arw else value == 1
        print(f"arw={arw}: c = {value:.3f}, variance of the gradient {spread[arw]:.5f}")
    assert spread[True] < spread[False]


def test_what_arw_remembers_goes_into_the_state_and_back():
    rows = greedy_rows()
    draft, batch, view = draft_and_batch(rows)
    one, two = VSD(VSDConfig(steps=STEPS)), VSD(VSDConfig(steps=STEPS))
    for step in range(4):
        one.loss(draft, batch, view, step=step)
    assert one.rejection is not None and two.rejection is not None and one.rejection.value < 1
    two.load(one.state())
    assert two.rejection.value == one.rejection.value
    assert torch.equal(two.state(), one.state())


def test_a_tree_keeps_a_path_alive_that_a_single_draw_would_lose():
    rows = greedy_rows()
    draft, batch, view = draft_and_batch(rows)
    promised = {}
    for name, options in {
        "law": {},
        "tree1": {"reach": "tree", "width": 1},
        "tree8": {"reach": "tree", "width": 8},
    }.items():
        terms = VSD(VSDConfig(steps=STEPS, arw=False, **options)).loss(draft, batch, view, step=0)
        kept, paths = terms.metrics["accepted_tokens"]
        promised[name] = float(kept / paths)
    assert promised["tree8"] > promised["tree1"]
    assert promised["law"] != promised["tree1"]


def test_a_draft_without_weights_is_refused_by_name():
    with pytest.raises(ConfigError, match="vsd is defined for drafts with weights, not for Ngram"):
        vsd.build(VSDConfig(), ngram.Ngram(ngram.NgramConfig()))
    with pytest.raises(ConfigError, match="estimator"):
        parse_section(VSDConfig, table={"estimator": "guess"}, source="recipe")
