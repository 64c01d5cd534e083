"""What is served by default: target and draft on the native forward together decode as transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from fixtures_decoding import TREE, new_tokens
from fixtures_drafts import tiny_eagle3
from fixtures_native import VOCAB, family
from paceline.decoding.level import NativeLevel, choose_level
from paceline.decoding.plan import ProposalPlan
from paceline.drafts.eagle3 import Eagle3
from paceline.targets.generic import Target

PLANS = {
    "chain of 1": ProposalPlan.chain(1), "chain of 3": ProposalPlan.chain(3), "chain of 8": ProposalPlan.chain(8),
    "tree": TREE, "wide tree": ProposalPlan(6, 5, 24),
}  # fmt: skip
NATIVE = ("llama", "llama3-rope", "one-key-head", "mistral", "qwen2", "qwen3")


def served(name: str) -> tuple[Target, Eagle3]:
    """A native target and a draft whose levels are native too, and accepted now and then."""
    target = Target(family(name))
    draft = tiny_eagle3(target, words=64)
    assert target.engine == "native" and isinstance(choose_level(draft, target), NativeLevel)
    return target, draft


def some_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, ((5, 17, 3, 40)[i % 4],), generator=generator).tolist() for i in range(count)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NATIVE)
def test_greedy_is_transformers_alone_and_in_a_ragged_batch(name: str, plan: str) -> None:
    target, draft = served(name)
    want = [new_tokens(target.model, prompt, max_new_tokens=24) for prompt in some_prompts(4)]
    ends = want[1][9]  # one row ends early
    cut = [tokens[: tokens.index(ends) + 1] if ends in tokens else tokens for tokens in want]
    options: dict[str, Any] = {"draft": draft, "plan": PLANS[plan], "max_new_tokens": 24, "eos_token_id": ends}
    together = paceline.generate(target, some_prompts(4), **options)
    assert [row.tokens for row in together.rows] == cut
    alone = [paceline.generate(target, prompt, **options).rows[0].tokens for prompt in some_prompts(4)]
    assert alone == cut


@pytest.mark.parametrize("law", ["ranked", "sampled"])
def test_sampled_rows_are_what_they_are_alone(law: Any) -> None:
    target, draft = served("llama")
    plan = ProposalPlan(3, 3, 8, law=law)
    options: dict[str, Any] = {
        "draft": draft, "plan": plan, "max_new_tokens": 16, "temperature": 0.9, "top_p": 0.9, "top_k": 20,
    }  # fmt: skip
    together = paceline.generate(target, some_prompts(4), seed=3, **options)
    for index, prompt in enumerate(some_prompts(4)):
        assert (
            paceline.generate(target, prompt, seed=3 + index, **options).rows[0].tokens == together.rows[index].tokens
        )


def test_processors_and_scores_are_transformers() -> None:
    target, draft = served("qwen2")
    options: dict[str, Any] = {
        "max_new_tokens": 16, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[5], [7, 8]],
    }  # fmt: skip
    prompt = some_prompts(1)[0]
    want = target.model.generate(
        torch.tensor([prompt]), do_sample=False, output_scores=True, return_dict_in_generate=True, **options
    )
    found = paceline.generate(
        target, prompt, draft=draft, plan=TREE, output_scores=True, return_dict_in_generate=True, **options
    ).rows[0]
    assert found.tokens == want.sequences[0, len(prompt) :].tolist()
    assert found.scores is not None
    torch.testing.assert_close(found.scores, torch.cat(want.scores), atol=1e-4, rtol=1e-4)
