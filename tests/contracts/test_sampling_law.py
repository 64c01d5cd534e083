"""Acceptance 26 (K15): what the whole loop samples follows the target's law: proved by enumeration, then counted.

The proof runs the production loop, from options to commits, once for each way its coins and draws can fall; the law of
what it emits is compared with the closed form.  Counting is the second line of defence, with real dice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import paceline
from exact.enumeration import outcomes
from fixtures_blocks import tiny_dflash
from fixtures_drafts import tiny_draft, tiny_eagle3
from fixtures_models import Scripted, bigram_model, make_target, random_table
from paceline.decoding import options as opt
from paceline.decoding.binding import Draft, make_loop, make_row
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import SequentialProposer
from paceline.decoding.sampling import DraftSampling
from paceline.ops.sampling import probabilities
from paceline.targets.generic import Target

SAMPLED_CHAIN = ProposalPlan.chain(2, law="sampled")
SAMPLED_TREE = ProposalPlan(depth=2, width=2, nodes=4, law="sampled")
RANKED_TREE = ProposalPlan(depth=2, width=2, nodes=4)


@functools.cache
def bigram(vocab: int) -> tuple[Target, Tensor]:
    """A target of random rows, and the rows: logits after each token, as the model says them."""
    model = bigram_model(random_table(vocab, seed=vocab, scale=0.9))
    with torch.no_grad():
        return make_target(model), model(torch.arange(vocab)[:, None]).logits[:, 0]


@functools.cache
def eagle(vocab: int, words: int | None = None) -> Draft:
    return tiny_eagle3(bigram(vocab)[0], words=words, seed=3, scale=0.6)


@functools.cache
def block(vocab: int, words: int | None = None) -> Draft:
    return tiny_dflash(bigram(vocab)[0], words=words, block=4, seed=3, scale=0.6)


@functools.cache
def feature(name: str, vocab: int, words: int | None = None) -> Draft:
    return tiny_draft(name, bigram(vocab)[0], words=words, seed=3, scale=0.6)


def scripted(vocab: int) -> Draft:
    """A lookup draft that says the second-likeliest token, and then again: right now and then."""
    second = bigram(vocab)[1].topk(2, dim=-1).indices[:, 1].tolist()

    def script(context: list[int], length: int) -> list[int]:
        path: list[int] = []
        for _ in range(length):
            path.append(second[(context + path)[-1]])
        return path

    return Scripted(script)


class NoEcho(LogitsProcessor):
    """Makes the last token less likely, and what came before it impossible: the law depends on the path."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.scatter_add(1, input_ids[:, -1:], torch.full((len(scores), 1), -1.0))
        return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)


Law = Callable[[tuple[int, ...]], Tensor]


def law_of(vocab: int, *, has_processor: bool = False, **filters: Any) -> Law:
    """The closed form: the next token's law after a path of tokens, [V] float64."""
    rows = bigram(vocab)[1].double()

    def law(path: tuple[int, ...]) -> Tensor:
        logits = rows[path[-1]].clone()
        if has_processor:
            logits[path[-1]] -= 1.0
            logits[path[-2]] = -torch.inf
        return probabilities(logits, **filters)

    return law


def joint(law: Law, path: tuple[int, ...], *, length: int) -> Tensor:
    """[V] * length: the law of the next tokens behind a path."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    now = law(path)
    return torch.stack([now[token] * joint(law, (*path, token), length=length - 1) for token in range(len(now))])


# name -> (vocabulary, draft, plan, options)
PROOFS: dict[str, tuple[int, Callable[[], Draft], ProposalPlan, dict[str, Any]]] = {
    "sampled chain": (3, lambda: eagle(3), SAMPLED_CHAIN, {"temperature": 0.7}),
    "sampled chain, processor": (3, lambda: eagle(3), SAMPLED_CHAIN, {"temperature": 1.3}),
    "sampled chain, small vocabulary, top-k": (4, lambda: eagle(4, 2), SAMPLED_CHAIN, {"temperature": 1.0, "top_k": 3}),
    "sampled tree": (3, lambda: eagle(3), SAMPLED_TREE, {"temperature": 1.0}),
    "sampled tree, used-up support": (3, lambda: eagle(3), SAMPLED_TREE, {"temperature": 0.7, "top_k": 2}),
    "sampled tree, top-p, processor": (3, lambda: eagle(3), SAMPLED_TREE, {"temperature": 1.0, "top_p": 0.8}),
    "ranked tree": (4, lambda: eagle(4), RANKED_TREE, {"temperature": 0.7, "top_p": 0.9}),
    "ranked tree, processor": (4, lambda: eagle(4), RANKED_TREE, {"temperature": 1.0}),
    "ranked chain": (4, lambda: eagle(4, 3), ProposalPlan.chain(2), {"temperature": 1.0}),
    "block, sampled chain": (3, lambda: block(3), SAMPLED_CHAIN, {"temperature": 0.7}),
    "block, sampled tree, processor": (3, lambda: block(3), SAMPLED_TREE, {"temperature": 1.0}),
    "block, sampled tree, small vocabulary": (4, lambda: block(4, 2), SAMPLED_TREE, {"temperature": 1.0, "top_k": 3}),
    "block, ranked tree": (4, lambda: block(4), RANKED_TREE, {"temperature": 0.7, "top_p": 0.9}),
    "sampled chain of eagle2": (3, lambda: feature("eagle2", 3), SAMPLED_CHAIN, {"temperature": 0.7}),
    "sampled tree of griffin": (3, lambda: feature("griffin", 3), SAMPLED_TREE, {"temperature": 1.0}),
    "ranked tree of eagle2, small vocabulary": (4, lambda: feature("eagle2", 4, 3), RANKED_TREE, {"temperature": 0.7}),
    "lookup tree": (4, lambda: scripted(4), RANKED_TREE, {"temperature": 1.0, "top_k": 3}),
}


def emitted(target: Target, draft: Draft, plan: ProposalPlan, prompt: list[int], **options: Any) -> tuple[int, ...]:
    """The first token and what the first round with a proposal commits."""
    stream = paceline.generate_stream(target, prompt, draft=draft, plan=plan, max_new_tokens=4, **options)
    return tuple(token for _ in range(2) for token in next(stream).tokens)


@pytest.mark.parametrize("case", PROOFS)
def test_every_outcome_of_a_round_of_the_loop(case: str) -> None:
    vocab, draft, plan, options = PROOFS[case]
    has_processor = "processor" in case
    law = law_of(vocab, has_processor=has_processor, **options)
    prompt = [1, 0]
    first = int(law((1, 0)).argmax())
    processors = [NoEcho()] if has_processor else []

    def one_round() -> tuple[int, ...]:
        forced = {"logits_processor": [*processors, Force(first)]}
        return emitted(bigram(vocab)[0], draft(), plan, prompt, **options, **forced)

    found = torch.zeros([vocab] * 3, dtype=torch.float64)
    total, lengths = 0.0, set()
    for tokens, chance in outcomes(one_round):
        assert tokens[0] == first
        behind = tokens[1:]
        found[behind] += chance * joint(law, (1, 0, *tokens), length=3 - len(behind))
        total += chance
        lengths.add(len(behind))
    assert abs(total - 1.0) < 1e-9
    torch.testing.assert_close(found, joint(law, (1, 0, first), length=3), atol=1e-6, rtol=0)
    assert len(lengths) > 1


class Force(LogitsProcessor):
    """Takes the first token's choice away, so that fewer outcomes are left to run through."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 2:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


@pytest.mark.parametrize(
    "plan", [ProposalPlan.chain(1, law="sampled"), ProposalPlan(depth=1, width=2, nodes=2)], ids=str
)
def test_every_outcome_of_a_whole_generation(plan: ProposalPlan) -> None:
    """Prefill, a round with a proposal, and where nothing was accepted a last round without one."""
    law = law_of(3, temperature=0.8)
    found = torch.zeros([3] * 3, dtype=torch.float64)

    def run() -> tuple[int, ...]:
        result = paceline.generate(bigram(3)[0], [0], draft=eagle(3), plan=plan, max_new_tokens=3, temperature=0.8)
        return tuple(result.rows[0].tokens)

    for tokens, chance in outcomes(run):
        found[tokens] += chance
    torch.testing.assert_close(found, joint(law, (0,), length=3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("draft_temperature", [0.0, 4.0])
def test_the_draft_may_draw_at_another_temperature(draft_temperature: float) -> None:
    """Draft T = 0 and target T = 1, and the reverse: other acceptance, same law."""
    vocab, law = 3, law_of(3, temperature=1.0)
    target, draft = bigram(vocab)[0], eagle(vocab)
    ids = torch.tensor([[2]])

    def run() -> tuple[int, ...]:
        captured = opt.capture(target.model, ids, options={"do_sample": True, "top_k": 0, "max_new_tokens": 3})
        loop = make_loop(draft, target, plan=SAMPLED_CHAIN, captured=captured)
        loop.proposer = SequentialProposer(draft, target, SAMPLED_CHAIN, DraftSampling(temperature=draft_temperature))  # type: ignore[arg-type]
        row = make_row(captured, row=0, index=0, padding=0, seed=0)
        list(loop.run([row]))
        return tuple(row.new_tokens)

    found = torch.zeros([vocab] * 3, dtype=torch.float64)
    for tokens, chance in outcomes(run):
        found[tokens] += chance
    torch.testing.assert_close(found, joint(law, (2,), length=3), atol=1e-6, rtol=0)


COUNTED: dict[str, tuple[Callable[[], Draft], ProposalPlan, dict[str, Any]]] = {
    "T=1, sampled tree": (
        lambda: eagle(8),
        ProposalPlan(depth=2, width=3, nodes=6, law="sampled"),
        {"temperature": 1.0},
    ),
    "T=0.7, sampled chain": (lambda: eagle(8), SAMPLED_CHAIN, {"temperature": 0.7}),
    "block, T=1, sampled tree": (
        lambda: block(8),
        ProposalPlan(depth=2, width=3, nodes=6, law="sampled"),
        {"temperature": 1.0},
    ),
    "top-k 4, ranked tree": (lambda: eagle(8), RANKED_TREE, {"temperature": 1.0, "top_k": 4}),
    "top-p 0.8, lookup chain": (lambda: scripted(8), ProposalPlan.chain(2), {"temperature": 1.0, "top_p": 0.8}),
}
SAMPLES = 4000


def p_value(counts: Tensor, law: Tensor) -> float:
    """Chi-square test of counts against a law of the same shape; cells that expect fewer than 5 are put together."""
    observed, expected = counts.double().flatten(), law.flatten() * float(counts.sum())
    assert not observed[law.flatten() == 0].any(), "something outside the support was drawn"
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    is_used = expected > 0
    statistic = ((observed - expected)[is_used] ** 2 / expected[is_used]).sum()
    freedom = max(int(is_used.sum()) - 1, 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0, dtype=torch.float64), statistic / 2))


def draws(draft: Draft, plan: ProposalPlan, *, samples: int, batch: int = 1000, **options: Any) -> Tensor:
    """[samples, 3] tokens behind the prompt [5], in batches of rows with a seed each."""
    target = bigram(8)[0]
    wanted = opt.with_sampling({"max_new_tokens": 3, **options})  # type: ignore[typeddict-item]
    captured = opt.capture(target.model, torch.tensor([[5]]), options=wanted)
    found: list[Sequence[int]] = []
    for start in range(0, samples, batch):
        rows = [make_row(captured, row=0, index=i, padding=0, seed=start + i) for i in range(batch)]
        loop = make_loop(draft, target, plan=plan, captured=captured)
        list(loop.run(rows))
        assert 0 < loop.stats.total.accepted < loop.stats.total.emitted
        found += [row.new_tokens for row in rows]
    return torch.tensor(found)


@pytest.mark.parametrize("case", COUNTED)
def test_counts_follow_the_law(case: str) -> None:
    draft, plan, options = COUNTED[case]
    tokens = draws(draft(), plan, samples=SAMPLES, **options)
    law = joint(law_of(8, **options), (5,), length=3)
    counts = torch.zeros_like(law).index_put_(
        tuple(tokens.T), torch.ones(len(tokens), dtype=law.dtype), accumulate=True
    )
    assert p_value(counts.sum(dim=(1, 2)), law.sum(dim=(1, 2))) > 1e-4  # token 1
    assert p_value(counts.sum(dim=(0, 2)), law.sum(dim=(0, 2))) > 1e-4  # token 2, the first with a proposal
    assert p_value(counts.sum(dim=2), law.sum(dim=2)) > 1e-4  # the pair (1, 2)
    assert p_value(counts.sum(dim=0), law.sum(dim=0)) > 1e-4  # the pair (2, 3)


def test_the_count_would_notice() -> None:
    law = joint(law_of(8, temperature=1.0), (5,), length=2)
    other = joint(law_of(8, temperature=0.7), (5,), length=2)
    generator = torch.Generator().manual_seed(0)
    flat = torch.multinomial(other.flatten(), SAMPLES, replacement=True, generator=generator)
    counts = torch.bincount(flat, minlength=64).reshape(8, 8)
    assert p_value(counts, law) < 1e-4 < p_value(counts, other)
