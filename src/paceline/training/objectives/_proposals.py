"""The E-step: what share of a draft's proposals reaches each depth of the oracle's path, is kept there, or is refused.

`expected` takes the expectation exactly, `sampled` draws S proposals per row.  Both work on fixed laws: no gradient
passes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops.fused_losses import CHUNK, is_among_best
from paceline.ops.path_rules import Split
from paceline.ops.paths import Utility, reached, worth
from paceline.training.objectives._oracle import OracleStep


@dataclass(frozen=True, slots=True)
class Weights:
    """What the rows of one depth weigh, [m] each, in the order of its `place`.

    kept: of a unit of what is kept, utility included.  corrected: of a unit of what is corrected, before c.
    alive: share of proposals that come here.  draws: [m, S] int64 refused draft ids, -1 for none; None for `expected`.
    """

    kept: Tensor
    corrected: Tensor
    alive: Tensor
    draws: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """Shares of proposals over all depths and rows: alive [K, n] before a depth, kept [K, n] at it."""

    alive: Tensor
    kept: Tensor


def chances(path: Sequence[OracleStep], said: Sequence[Tensor]) -> Tensor:
    """[K, n] chance that a proposal at depth k is kept and lies on the oracle's path; 0 where no path leads.

    Of the oracle's token x it is min(1, q(x) / p(x)), which is q(x) where p is one at x.
    """
    found = torch.zeros(len(path), len(path[0].active), device=said[0].device)
    for depth, (one, logits) in enumerate(zip(path, said, strict=True)):
        q, p = _of(logits, one.label), _law_of(one)
        chance = torch.minimum(q, p) / p.clamp_min(torch.finfo(p.dtype).tiny)
        found[depth, one.place] = chance.masked_fill(one.label < 0, 0.0)
    return found


def among_best(path: Sequence[OracleStep], said: Sequence[Tensor], *, width: int) -> Tensor:
    """[K, n], 1 where the oracle's token is among the draft's `width` best: a tree's way of keeping it."""
    found = torch.zeros(len(path), len(path[0].active), device=said[0].device)
    for depth, (one, logits) in enumerate(zip(path, said, strict=True)):
        found[depth, one.place] = is_among_best(logits, labels=one.label, count=width).float()
    return found


def expect(path: Sequence[OracleStep], survive: Tensor, *, utility: Utility) -> tuple[Fate, list[Weights]]:
    """The exact expectation.  survive: [K, n].  A unit is then a law's mass: what is corrected is (p - q)+ itself."""
    alive, kept = reached(survive, goes_on=torch.stack([one.goes_on for one in path]))
    value = worth(alive, kept, utility=utility)
    weights = [
        Weights((alive[k] * value[k])[one.place], alive[k][one.place], alive[k][one.place])
        for k, one in enumerate(path)
    ]
    return Fate(alive, kept), weights


def draw(
    path: Sequence[OracleStep], said: Sequence[Tensor], survive: Tensor, *, count: int, utility: Utility, seed: int
) -> tuple[Fate, list[Weights]]:
    """`count` proposals for each row, drawn.  A unit is then the oracle's token: its weight is the share itself."""
    generator = torch.Generator(survive.device).manual_seed(seed)
    left = torch.full_like(survive[0], count)
    alive, kept = torch.zeros_like(survive), torch.zeros_like(survive)
    refused: list[Tensor] = []
    for k, (one, logits) in enumerate(zip(path, said, strict=True)):
        alive[k] = left * one.goes_on
        kept[k] = left = torch.binomial(alive[k], survive[k].clamp(0, 1), generator=generator)
        lost = (alive[k] - kept[k])[one.place].long()
        refused.append(_draw_refused(one, logits, lost, most=count, generator=generator))
    alive, kept = alive / count, kept / count
    value = worth(alive, kept, utility=utility)
    weights = [
        Weights((kept[k] * value[k])[one.place], (alive[k] - kept[k])[one.place], alive[k][one.place], refused[k])
        for k, one in enumerate(path)
    ]
    return Fate(alive, kept), weights


def counted(draws: Tensor, *, like: Tensor) -> Tensor:
    """Shares of draws: [m, S] ids or -1 -> [m, W]."""
    shares = torch.zeros_like(like)
    is_draw = (draws >= 0).to(like.dtype) / draws.shape[1]
    return shares.scatter_add_(1, draws.clamp_min(0), is_draw)


def _draw_refused(one: OracleStep, logits: Tensor, lost: Tensor, *, most: int, generator: torch.Generator) -> Tensor:
    """[m, most] ids drawn from (q - p)+, as many per row as proposals were lost there, then -1."""
    draws = torch.full((len(lost), most), -1, dtype=torch.int64, device=lost.device)
    rank = torch.arange(most, device=lost.device)
    rows = lost.nonzero().flatten()
    for part in rows.split(CHUNK):
        q = logits[part].float().softmax(dim=-1)
        refused = Split.of(one.law(part), q).refused
        possible = refused.sum(dim=-1) > 0  # rounding may leave nothing to refuse
        refused[~possible, 0] = 1.0
        found = torch.multinomial(refused, most, replacement=True, generator=generator)
        draws[part] = torch.where((rank < lost[part, None]) & possible[:, None], found, -1)
    return draws


def _of(logits: Tensor, label: Tensor) -> Tensor:
    """q of a label: [m, W], [m] -> [m] float32, a chunk at a time."""
    found = torch.empty(len(label), device=logits.device)
    for start in range(0, len(label), CHUNK):
        part = slice(start, start + CHUNK)
        wide = logits[part].float()
        chosen = wide.gather(1, label[part, None].clamp_min(0))[:, 0]
        found[part] = (chosen - wide.logsumexp(dim=-1)).exp()
    return found


def _law_of(one: OracleStep) -> Tensor:
    """p of the oracle's token, [m] float32: 1 for a greedy oracle."""
    if one.temperature == 0:
        return torch.ones(len(one.label), device=one.label.device)
    found = torch.empty(len(one.label), device=one.label.device)
    for start in range(0, len(found), CHUNK):
        part = slice(start, start + CHUNK)
        found[part] = one.law(part).gather(1, one.label[part, None].clamp_min(0))[:, 0]
    return found
