"""Small drafts for tiny targets, and batches to train them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.drafts import eagle3
from paceline.drafts._base import DraftPlugin
from paceline.ops.vocab import DraftVocab
from paceline.plugins import load_plugin
from paceline.targets._facts import facts_of
from paceline.targets.generic import Target
from paceline.training.objectives._base import TrainingBatch

# Standard deviation of the weights: large enough that guesses differ from row to row, small enough that what a draft is
# fed of its own does not grow from step to step where no norm stands before its layer.
SCALES = {"eagle3": 0.3, "eagle2": 0.1, "griffin": 0.1}
SEQUENTIAL = tuple(SCALES)
FEATURE = ("eagle2", "griffin")  # they regress the target's last hidden state and borrow its head


def tiny_draft(
    name: str, target: Target, *, words: int | None = None, seed: int = 0, scale: float | None = None
) -> Any:  # the plug-in's own class: tests look at its parts
    """A draft of any architecture with random weights, which has borrowed what it needs of the target."""
    torch.manual_seed(seed)
    facts, plugin = facts_of(target.model), load_plugin("drafts", name=name, kind=DraftPlugin)
    size = words or facts.vocab_size
    options: dict[str, object] = {"draft_vocab_size": size, "intermediate_size": 64}
    vocab = (
        DraftVocab.full(size) if words is None else DraftVocab.from_counts(torch.arange(facts.vocab_size), size=size)
    )
    draft = plugin.build(plugin.configure(facts, options), vocab)
    with torch.no_grad():
        for weight_name, parameter in draft.named_parameters():
            if "norm" not in weight_name:
                parameter.normal_(std=scale or SCALES[name])
    draft.borrow(target)
    return draft


def tiny_eagle3(target: Target, *, words: int | None = None, seed: int = 0, scale: float = 0.3) -> eagle3.Eagle3:
    """An EAGLE-3 draft with weights large enough that its guesses differ from row to row."""
    return tiny_draft("eagle3", target, words=words, seed=seed, scale=scale)


def batch_of(target: Target, rows: list[tuple[list[int], int]], *, taps: tuple[int, ...]) -> TrainingBatch:
    """Rows of (ids, prompt length); everything behind the prompt is supervised."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, prompt : len(tokens)] = True
    target.set_taps(taps)
    scores = target.full_forward(ids)
    target.set_taps(())
    assert scores.taps is not None and scores.hidden is not None
    return TrainingBatch(ids, mask, torch.tensor([len(tokens) for tokens, _ in rows]), scores.taps, scores.hidden)


def random_rows(count: int, *, vocab: int = 64, seed: int = 0) -> list[tuple[list[int], int]]:
    """Rows of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(12, 3), (17, 5), (9, 4), (15, 9)]
    return [
        (torch.randint(0, vocab, (sizes[i % 4][0],), generator=generator).tolist(), sizes[i % 4][1])
        for i in range(count)
    ]


def max_difference(one: Tensor, two: Tensor) -> float:
    """Largest absolute difference."""
    return float((one - two).detach().abs().max())
