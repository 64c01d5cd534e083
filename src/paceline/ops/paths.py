"""Draft paths by depth: how many reach a depth, are accepted or first rejected there, and what that is worth.

Shares of paths are float tensors [K, n] over K depths and n rows.  They may be exact probabilities or counted draws:
the algebra is the same.  It knows no network and no law.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Utility = Literal["none", "length", "remaining"]


def reached(accept: Tensor, *, goes_on: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of paths that are alive before each depth, and that are accepted there.

    accept: [K, n] chance that the proposal at depth k is accepted, given that the path is alive.  goes_on: [K, n] bool,
    whether a path may be continued *into* depth k (at k = 0: whether the row is trained at all).
    Returns (alive [K, n], accepted [K, n]) with alive_0 = goes_on_0, accepted_k = alive_k accept_k and
    alive_{k+1} = accepted_k where goes_on_{k+1}, else 0: a path that cannot go on has ended, accepted so far.
    """
    alive, accepted = torch.empty_like(accept), torch.empty_like(accept)
    now = torch.ones_like(accept[0])
    for depth in range(len(accept)):
        alive[depth] = now * goes_on[depth]
        accepted[depth] = now = alive[depth] * accept[depth]
    return alive, accepted


def worth(alive: Tensor, accepted: Tensor, *, utility: Utility) -> Tensor:
    """Mean utility of the paths that are accepted at a depth: [K, n]; where there are none, that of `none`, else 0.

    alive, accepted: [K, n], as `reached` returns them.  A path with f accepted tokens of K is worth
    `none`: 1; `length`: f / K (methods.md 6.1 at T = 0); `remaining`: (f - k) / K at depth k, what is still to come
    with the token itself.  The sum of accepted_k remaining_k grad log q is the gradient of the accepted length over K.
    """
    if utility == "none":
        return torch.ones_like(accepted)
    depths = len(alive)
    count = torch.arange(depths, dtype=alive.dtype, device=alive.device)[:, None]
    rejected = alive - accepted
    ended = accepted - torch.cat([alive[1:], torch.zeros_like(alive[:1])])
    # Tokens kept by the paths that end at depth j: j if it is rejected there, j + 1 if it ends accepted.
    kept = count * rejected + (count + 1) * ended
    later = kept.flip(0).cumsum(0).flip(0)
    lengths = later - count * rejected  # of the paths that are accepted at k
    if utility == "remaining":
        lengths = lengths - count * accepted
    return lengths / (depths * accepted.clamp_min(torch.finfo(accepted.dtype).tiny)) * (accepted > 0)


def control_coefficient(covariance: float, variance: float, *, reliability: float) -> float:
    """Adaptive rejection weighting: -Cov(accepted, rejected) / Var(rejected), cut to [0, 1], times the reliability.

    Scores are added, accepted + c rejected, so this is the c of least variance; a control variate that is subtracted
    has it with the other sign (docs/log.md).
    reliability: share of proposals that are accepted.  Without any variance there is nothing to weigh: the reliability.
    """
    if variance <= 0:
        return reliability
    return min(max(-covariance / variance, 0.0), 1.0) * reliability
