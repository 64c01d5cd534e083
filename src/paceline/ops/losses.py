"""Losses for each position: the slow, readable truth that any fused kernel is tested against.

They know no masks, weights or averages: an objective sums them into a numerator and a denominator. Everything is
computed in float32 (float64 for float64 logits), and no gradient flows into a target.
"""

import torch
from torch import Tensor
from torch.nn import functional


def _log_law(logits: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(dim=-1)


def _fixed(target: Tensor, *, like: Tensor) -> Tensor:
    return target.detach().to(like.dtype)


def cross_entropy(logits: Tensor, *, labels: Tensor) -> Tensor:
    """-log q(label).  logits: [..., V] float.  labels: [...] int64.  Returns [...] float."""
    return -_log_law(logits).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def soft_cross_entropy(logits: Tensor, *, target: Tensor) -> Tensor:
    """-sum p log q; EAGLE-3's (arXiv 2503.01840).  logits, target (a law): [..., V] float.  Returns [...] float."""
    log_q = _log_law(logits)
    return -_times_log(_fixed(target, like=log_q), log_q).sum(dim=-1)


def top_cross_entropy(logits: Tensor, *, target: Tensor, count: int) -> Tensor:
    """-sum p log q over the target's `count` likeliest tokens, p not renormalised: HASS's top-K distillation.

    (Zhang et al., arXiv 2408.15766.)  logits, target (a law): [..., V] float.  Returns [...] float.
    """
    log_q = _log_law(logits)
    p = _fixed(target, like=log_q)
    ids = p.topk(min(count, p.shape[-1]), dim=-1).indices
    return -_times_log(p.gather(-1, ids), log_q.gather(-1, ids)).sum(dim=-1)


def emphasised(target: Tensor, *, count: int, share: float, top_share: float) -> tuple[Tensor, Tensor]:
    """share * soft_cross_entropy + top_share * top_cross_entropy as one: mass * soft_cross_entropy to another law.

    target: [..., V] float, a law.  Returns (law [..., V], mass [...]), float as the target; a mass of 0 means that
    neither counts, and comes with a law of zeros.
    """
    weights = target * share
    ids = target.topk(min(count, target.shape[-1]), dim=-1).indices
    weights.scatter_add_(-1, ids, target.gather(-1, ids) * top_share)
    mass = weights.sum(dim=-1)
    return weights.div_(mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1)), mass


def smooth_l1(estimate: Tensor, *, target: Tensor) -> Tensor:
    """Mean over the last dimension of d^2 / 2 where |d| < 1 and |d| - 1/2 elsewhere: EAGLE's (arXiv 2401.15077).

    estimate, target: [..., H] float.  Returns [...] float >= 0.
    """
    wide = estimate if estimate.dtype == torch.float64 else estimate.float()
    return functional.smooth_l1_loss(wide, _fixed(target, like=wide), reduction="none").mean(dim=-1)


def kl(logits: Tensor, *, target: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q).  logits, target (a law): [..., V] float.  Returns [...] float >= 0."""
    log_q = _log_law(logits)
    p = _fixed(target, like=log_q)
    return (torch.xlogy(p, p) - _times_log(p, log_q)).sum(dim=-1)


def reverse_kl(logits: Tensor, *, target_logits: Tensor) -> Tensor:
    """KL(q || p) = sum q (log q - log p).

    The target comes as logits, because a law that has underflowed to 0 would make this infinite.
    logits, target_logits: [..., V] float.  Returns [...] float >= 0; infinite where q has mass outside p's support.
    """
    log_q = _log_law(logits)
    log_p = _log_law(_fixed(target_logits, like=log_q))
    return _times_log(log_q.exp(), log_q - log_p).sum(dim=-1)


def total_variation(logits: Tensor, *, target: Tensor) -> Tensor:
    """TV(p, q) = 1/2 sum |p - q|, the chance that one drawn token is rejected.

    logits, target (a law): [..., V] float.  Returns [...] float in [0, 1].
    """
    q = _log_law(logits).exp()
    return 0.5 * (_fixed(target, like=q) - q).abs().sum(dim=-1)


def overlap(logits: Tensor, *, target: Tensor) -> Tensor:
    """sum min(p, q) = 1 - TV, the chance that one drawn token is accepted (arXiv 2211.17192).

    logits, target (a law): [..., V] float.  Returns [...] float in [0, 1].
    """
    q = _log_law(logits).exp()
    return torch.minimum(_fixed(target, like=q), q).sum(dim=-1)


def acceptance(logits: Tensor, *, target: Tensor) -> Tensor:
    """-log sum min(p, q), the `lk` loss.

    Formed from logarithms, so that it stays finite and has a gradient where p and q hardly meet.
    logits, target (a law): [..., V] float.  Returns [...] float >= 0.
    """
    log_q = _log_law(logits)
    return -torch.minimum(_fixed(target, like=log_q).log(), log_q).logsumexp(dim=-1)


def acceptance_hybrid(logits: Tensor, *, target: Tensor, eta: float) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta * overlap), the `lk` hybrid.

    KL leads while the laws hardly meet and TV when they do.  The weight carries no gradient [ours].
    logits, target (a law): [..., V] float.  eta: >= 0; 0 is plain KL.  Returns [...] float >= 0.
    """
    weight = (-eta * overlap(logits, target=target)).exp().detach()
    return weight * kl(logits, target=target) + (1.0 - weight) * total_variation(logits, target=target)


def overconfidence(logits: Tensor, *, weight: Tensor) -> Tensor:
    """sum w -log(1 - q), what a draft pays for its confidence in refused tokens (VSD's CAR, arXiv 2602.05774).

    logits, weight (fixed, >= 0): [..., V] float.  Returns [...] float >= 0.
    """
    q = _log_law(logits).exp()
    return -(_fixed(weight, like=q) * torch.log1p(-q)).sum(dim=-1)


def _times_log(p: Tensor, log: Tensor) -> Tensor:
    """p * log with 0 * -inf = 0, also in the gradient: a masked logit is -inf and its token has no mass."""
    return p * log.masked_fill(p == 0, 0.0)
