"""Small DFlash drafts for tiny targets, ready to speak with the target's head."""

from __future__ import annotations

import torch

from paceline.drafts import dflash
from paceline.ops.vocab import DraftVocab
from paceline.targets._facts import facts_of
from paceline.targets.generic import Target


def tiny_dflash(
    target: Target, *, words: int | None = None, block: int = 6, layers: int = 2, seed: int = 0, scale: float = 0.3
) -> dflash.DFlash:
    """A draft with weights large enough that its guesses differ from row to row and from slot to slot."""
    torch.manual_seed(seed)
    facts = facts_of(target.model)
    size = words or facts.vocab_size
    options: dict[str, object] = {
        "draft_vocab_size": size, "intermediate_size": 48, "block_size": block, "num_hidden_layers": layers,
        "mask_token_id": facts.vocab_size - 1,
    }  # fmt: skip
    vocab = (
        DraftVocab.full(size) if words is None else DraftVocab.from_counts(torch.arange(facts.vocab_size), size=size)
    )
    draft = dflash.build(dflash.configure(facts, options), vocab)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=scale)
    draft.borrow(target)
    return draft.eval()
