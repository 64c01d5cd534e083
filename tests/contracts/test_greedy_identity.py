"""Acceptance 3-8, 28 (K14, K18-K21): with any draft, greedy decoding is token for token what transformers generates."""

from __future__ import annotations

import functools

import pytest
import torch

import paceline
from fixtures_drafts import FEATURE
from fixtures_models import (
    GreedyPaths,
    adversary,
    bigram_model,
    cycle_table,
    make_target,
    oracle,
    pattern,
    random_table,
    tiny_llama,
    tiny_mistral,
)
from fixtures_text import tiny_tokenizer
from fixtures_training import trained_draft
from paceline.decoding.binding import Draft
from paceline.decoding.plan import ProposalPlan
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.targets.generic import Target

MODELS = {
    "cycle": lambda: bigram_model(cycle_table()),
    "bigram": lambda: bigram_model(random_table(64, seed=3)),
    "llama": tiny_llama,
    "window": tiny_mistral,
}
SCRIPTED = {"oracle": oracle, "adversary": adversary, "pattern": pattern}
PLANS = [ProposalPlan.chain(n) for n in (1, 3, 8)] + [
    ProposalPlan(depth=n, width=3, nodes=2 * n + 1) for n in (1, 3, 8)
]

# K14's twenty prompts on F1 and F2; the others, which say the same again, have four.
TWENTY = {(model, draft) for model in ("cycle", "llama") for draft in (*SCRIPTED, "trained")} | {("bigram", "trained")}


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 5, 9, 14]
    return [torch.randint(0, 64, (lengths[i % 4],), generator=generator).tolist() for i in range(count)]


def reference(model: object, prompt: list[int], **options: object) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)  # type: ignore[attr-defined]
    return out[0, len(prompt) :].tolist()


@functools.cache
def target_and_paths(model: str) -> tuple[Target, list[list[int]]]:
    target = make_target(MODELS[model](), tokenizer=tiny_tokenizer())
    return target, [reference(target.model, prompt, max_new_tokens=20) for prompt in prompts(20)]


@functools.cache
def paths_of(model: str) -> GreedyPaths:
    return GreedyPaths(target_and_paths(model)[0].model)


@functools.cache
def drafts_of(model: str, draft: str) -> Draft:
    target, expected = target_and_paths(model)
    if draft == "ngram":
        return Ngram(NgramConfig())
    if draft in SCRIPTED:
        return SCRIPTED[draft](target.model, paths=paths_of(model))
    known = zip(prompts(12), expected, strict=False)  # the last eight prompts are new to the draft
    changes = () if draft == "trained" else (f"draft.name={draft}",)
    return trained_draft(target, [(prompt + path, len(prompt)) for prompt, path in known], changes=changes)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("draft", [*SCRIPTED, "ngram", "trained", *FEATURE])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_is_identical(model: str, draft: str, plan: ProposalPlan) -> None:
    target, expected = target_and_paths(model)
    made = drafts_of(model, draft)
    count = 20 if (model, draft) in TWENTY else 4
    for start in range(0, count, 4):  # batches of four
        together = paceline.generate(target, prompts(20)[start : start + 4], draft=made, plan=plan, max_new_tokens=20)
        assert [row.tokens for row in together.rows] == expected[start : start + 4]
    for index in (2, 5, 15)[: count // 4]:  # alone
        alone = paceline.generate(target, prompts(20)[index], draft=made, plan=plan, max_new_tokens=20)
        assert alone.rows[0].tokens == expected[index]


@pytest.mark.parametrize("draft", ["trained", *FEATURE])
@pytest.mark.parametrize("model", MODELS)
def test_the_trained_draft_is_right_now_and_then(model: str, draft: str) -> None:
    """A draft that is never accepted, or always, would show nothing."""
    target, _ = target_and_paths(model)
    result = paceline.generate(
        target, prompts(20)[:4], draft=drafts_of(model, draft), plan=ProposalPlan.chain(3), max_new_tokens=20
    )
    assert 1.5 < result.stats.total.accepted_length <= 4.0


def test_pattern_accepts_what_it_says() -> None:
    target = make_target(tiny_llama())
    result = paceline.generate(
        target, prompts(1)[0], draft=pattern(target.model, [2]), plan=ProposalPlan.chain(4), max_new_tokens=30
    )
    assert set(result.stats.rows[0].runs) <= {2, 0, 1}
    assert result.stats.rows[0].runs[2] >= 9


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_exact_number_of_tokens_with_an_accepted_block_of_eight(count: int) -> None:
    target = make_target(bigram_model(cycle_table()))
    result = paceline.generate(
        target, [5], draft=oracle(target.model), plan=ProposalPlan.chain(8), max_new_tokens=count
    )
    assert len(result.rows[0].tokens) == count == len(result.rows[0].from_draft)


@pytest.mark.parametrize("place", range(10))
def test_end_token_inside_an_accepted_block(place: int) -> None:
    target = make_target(bigram_model(cycle_table()))
    path = reference(target.model, [0], max_new_tokens=10)
    eos = path[place]
    streamed: list[int] = []
    result = paceline.generate(
        target, [0], draft=oracle(target.model), plan=ProposalPlan.chain(8), max_new_tokens=30,
        eos_token_id=[eos, 63], pad_token_id=63, output_scores=True,
        on_commit=lambda commit: streamed.extend(commit.tokens),
    )  # fmt: skip
    row = result.rows[0]
    assert row.tokens == path[: place + 1] == streamed
    assert row.scores is not None and len(row.scores) == place + 1
    total = result.stats.total
    assert total.emitted == place  # the first token comes from prefill
    assert total.accepted <= total.emitted


def test_adversary_and_oracle_counts() -> None:
    target = make_target(bigram_model(cycle_table()))
    good = paceline.generate(target, [0], draft=oracle(target.model), plan=ProposalPlan.chain(4), max_new_tokens=21)
    assert good.stats.total.accepted_length == 5.0
    bad = paceline.generate(target, [0], draft=adversary(target.model), plan=ProposalPlan.chain(4), max_new_tokens=21)
    assert bad.stats.total.accepted == 0 and bad.stats.total.accepted_length == 1.0
