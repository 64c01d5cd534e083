"""A short trial of a family that no test has proved: a tree's scores must equal plain calls over its paths.

A model that takes positions from a padding mask or from the place of a key in the cache would score trees wrongly and
in silence.  The trial knows only how a target is called, not what is inside; it is skipped for proven families.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import TargetError
from paceline.ops import tree
from paceline.records import Scores
from paceline.targets import _transformers as tf
from paceline.targets._cache import TargetCache

# tests/contracts/test_target_families.py proves these, window, soft caps and mixed layers included.
PROVEN = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "smollm3", "phi3",
    "olmo2", "olmo3", "granite", "cohere2", "starcoder2", "gpt_oss", "glm4", "exaone4", "gpt2", "gpt_neox",
    "deepseek_v3",
})  # fmt: skip
PARENTS = [-1, 0, 0, 1, 2, 4]  # the second branch lies behind the first in the cache: its depth is not its slot
PREFIX = 9
# Largest difference, as a share of the logits' standard deviation.  A wrong position or mask moves logits by about one;
# other shapes of the same sum move them by 1e-6 in float32, and by a few hundredths in 16 bits.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_TOLERANCE = 0.25


class Scorer(Protocol):
    """What the trial asks of a target."""

    model: Any
    vocab_size: int

    def new_cache(self, batch: int, *, capacity: int) -> TargetCache:
        """An empty cache."""
        ...

    def prefill(self, cache: TargetCache, prompts: list[Tensor]) -> Scores:
        """Run and commit prompts."""
        ...

    def score(self, cache: TargetCache, tokens: Tensor, *, mask: Tensor, depths: Tensor) -> Scores:
        """Score a tree."""
        ...


@torch.no_grad()
def refuse_inexact(target: Scorer) -> None:
    """Raise TargetError if an unproven family scores a small tree otherwise than its paths one by one."""
    model = target.model
    kind = tf.text_config(model).model_type
    if kind in PROVEN:
        return
    ids = torch.arange(PREFIX + len(PARENTS)) * 7919 % target.vocab_size
    found, expected = _tree_scores(target, ids), _path_scores(model, ids)
    worst, spread = float((found - expected).abs().max()), float(expected.std())
    if not worst <= TOLERANCE.get(model.dtype, HALF_TOLERANCE) * spread:
        raise TargetError(
            f"{type(model).__name__} ({kind}) scores a tree otherwise than its paths one by one (logits differ by "
            f"{worst:.2g}); its positions or masks cannot be given from outside, so it cannot verify; choose another"
        )


def _tree_scores(target: Scorer, ids: Tensor) -> Tensor:
    parents = torch.tensor([PARENTS])
    mask = tree.ancestors(parents)
    cache = target.new_cache(1, capacity=len(ids))
    target.prefill(cache, [ids[:PREFIX]])
    scores = target.score(cache, ids[None, PREFIX:], mask=mask, depths=mask.sum(dim=-1) - 1)
    leaves = [path[-1] for path in tree.leaf_paths(PARENTS)]
    return scores.logits[0, leaves].float()


def _path_scores(model: Any, ids: Tensor) -> Tensor:
    device = model.get_input_embeddings().weight.device
    nodes = ids[PREFIX:]
    paths = [torch.cat([ids[:PREFIX], nodes[path]])[None].to(device) for path in tree.leaf_paths(PARENTS)]
    return torch.stack([model(path, use_cache=False).logits[0, -1] for path in paths]).float()
