"""Drafts that know a text beforehand, plans, and what transformers' plain `generate` says: shared by the contracts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fixtures_models import Scripted
from paceline.decoding.plan import ProposalPlan

CHAIN = ProposalPlan.chain(4)
TREE = ProposalPlan(depth=3, width=2, nodes=6)
SAMPLED_CHAIN = ProposalPlan.chain(3, law="sampled")
SAMPLED_TREE = ProposalPlan(depth=3, width=3, nodes=8, law="sampled")


def prompts(count: int, *, seed: int = 0, vocab: int = 64) -> list[list[int]]:
    """Prompts of 5, 9, 3 and 14 tokens, over and over."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, ((5, 9, 3, 14)[i % 4],), generator=generator).tolist() for i in range(count)]


def plain(model: Any, prompt: Sequence[int], **options: Any) -> Any:
    """transformers' own result for one prompt, ids, scores and logits."""
    ids = torch.tensor([list(prompt)])
    recorded = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **recorded, **options)


def new_tokens(model: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    """The ids that plain greedy `generate` adds."""
    return plain(model, prompt, do_sample=False, **options).sequences[0, len(prompt) :].tolist()


def follows(texts: Sequence[Sequence[int]], *, beyond: Sequence[int] = (7, 7, 7, 7, 7, 7, 7, 7)) -> Scripted:
    """Proposes the known continuation, and goes on behind its end: everything that may be committed is accepted."""

    def script(context: list[int], length: int) -> list[int]:
        for text in texts:
            if list(text[: len(context)]) == context:
                return [*text[len(context) :], *beyond][:length]
        return list(beyond)[:length]

    return Scripted(script)


def trips(texts: Sequence[Sequence[int]], *, runs: Sequence[int] = (3, 0, 1, 2), vocab: int = 64) -> Scripted:
    """Proposes the known continuation for runs[context mod 4] tokens and something else from there on."""
    right = follows(texts).script

    def script(context: list[int], length: int) -> list[int]:
        keep = runs[len(context) % len(runs)]
        path = right(context, length)
        return [token if place < keep else (token + 1) % vocab for place, token in enumerate(path)]

    return Scripted(script)
