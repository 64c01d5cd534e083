"""Compare the native forward with the eager one before the first use: a few random tokens, ragged rows, a tree.

It knows no architecture: whatever the two disagree about, the native forward is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from paceline.native.build import Unavailable
from paceline.records import Scores
from paceline.targets._cache import TargetCache
from paceline.targets._native.model import NativeForward

TOLERANCE = 1e-4  # of the largest number; rounding is below 1e-5
CHAIN, KEPT, CAPACITY = 7, (7, 4), 16
PARENTS = (-1, 0, 0, 1, 1, 2)


class EagerScore(Protocol):
    """`Target.score` without the native forward."""

    def __call__(self, cache: TargetCache, tokens: Tensor, *, mask: Tensor, depths: Tensor) -> Scores: ...


def compare(native: NativeForward, *, eager: EagerScore, vocab_size: int) -> None:
    """Raises Unavailable if logits, keys or values differ by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    chain = torch.randint(0, vocab_size, (len(KEPT), CHAIN), generator=generator)
    tree = torch.randint(0, vocab_size, (len(KEPT), len(PARENTS)), generator=generator)

    def run(score: Callable[..., Scores]) -> dict[str, list[Tensor]]:
        cache = TargetCache(len(KEPT), capacity=CAPACITY)
        causal = torch.ones(CHAIN, CHAIN, dtype=torch.bool).tril().expand(len(KEPT), -1, -1)
        first = score(cache, chain, mask=causal, depths=torch.arange(CHAIN).expand(len(KEPT), -1))
        cache.commit([range(count) for count in KEPT])
        mask, depths = _tree()
        second = score(cache, tree, mask=mask.expand(len(KEPT), -1, -1), depths=depths.expand(len(KEPT), -1))
        return {
            "logits": [first.logits, second.logits],
            "keys": [cache.keys[layer] for layer in sorted(cache.keys)],
            "values": [cache.values[layer] for layer in sorted(cache.values)],
        }

    expected, found = run(eager), run(native.score)
    for what, tensors in expected.items():
        for want, have in zip(tensors, found[what], strict=True):
            worst = float((want - have).abs().max() / want.abs().max().clamp_min(1e-30))
            if not worst <= TOLERANCE:
                raise Unavailable(f"its {what} and the native forward's differ by {worst:.0e} of the largest number")


def _tree() -> tuple[Tensor, Tensor]:
    """Mask [N, N] and depths [N] of the tree of PARENTS."""
    mask = torch.eye(len(PARENTS), dtype=torch.bool)
    depths = torch.zeros(len(PARENTS), dtype=torch.int64)
    for node, parent in enumerate(PARENTS[1:], start=1):
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return mask, depths
