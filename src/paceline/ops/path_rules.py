"""Losses of a row of logits with their slopes, for `fused_losses.head_rule`: value and gradient in one reading.

Each has its slow twin in `losses.py`, which autograd differentiates; a test compares the two.  `log_q` is the draft's
log law [m, W]; every weight is fixed.  They know neither paths nor batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALMOST_ONE = 1 - 1e-6  # a confidence above it counts as this much in -log(1 - q)
NO_MASS = 1e-12  # a smaller probability of the target counts as this much in KL(q || p)


@dataclass(frozen=True, slots=True)
class Split:
    """How speculative sampling splits two laws [m, W]: min(p, q) is kept, (p - q)+ corrects, (q - p)+ is refused."""

    kept: Tensor
    corrected: Tensor
    refused: Tensor

    @classmethod
    def of(cls, p: Tensor, q: Tensor) -> Split:
        """Of two laws, or of a one-hot p for the greedy oracle."""
        kept = torch.minimum(p, q)
        return cls(kept, p - kept, q - kept)


def weighted_likelihood(log_q: Tensor, *, target: Tensor) -> tuple[Tensor, Tensor]:
    """-sum a log q for any weights a [m, W] >= 0: losses [m], slopes [m, W]."""
    losses = -(target * log_q).sum(dim=-1)
    return losses, log_q.exp() * target.sum(dim=-1, keepdim=True) - target


def overconfidence(log_q: Tensor, *, weight: Tensor) -> tuple[Tensor, Tensor]:
    """sum w -log(1 - q) for weights w [m, W] >= 0 of refused tokens: losses [m], slopes [m, W]."""
    q = log_q.exp().clamp_max(ALMOST_ONE)
    pull = weight * q / (1 - q)
    return -(weight * torch.log1p(-q)).sum(dim=-1), pull - log_q.exp() * pull.sum(dim=-1, keepdim=True)


def reverse_kl(log_q: Tensor, *, p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) with p [m, W] no smaller than NO_MASS: losses [m], slopes [m, W]."""
    q = log_q.exp()
    excess = log_q - p.clamp_min(NO_MASS).log()
    losses = (q * excess.masked_fill(q == 0, 0.0)).sum(dim=-1)
    return losses, q * (excess.masked_fill(q == 0, 0.0) - losses[:, None])


def overlap(log_q: Tensor, *, p: Tensor) -> tuple[Tensor, Tensor]:
    """sum min(p, q) and its slopes: [m], [m, W].  It grows where q < p."""
    q = log_q.exp()
    low = q * (q < p)
    return torch.minimum(p, q).sum(dim=-1), low - q * low.sum(dim=-1, keepdim=True)


def acceptance(log_q: Tensor, *, p: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): losses [m], slopes [m, W]."""
    found, slope = overlap(log_q, p=p)
    found = found.clamp_min(torch.finfo(found.dtype).tiny)
    return -found.log(), -slope / found[:, None]


def acceptance_hybrid(log_q: Tensor, *, p: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """w KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta * overlap): losses [m], slopes [m, W]."""
    found, slope = overlap(log_q, p=p)
    share = (-eta * found).exp()[:, None]
    q = log_q.exp()
    forward = (torch.xlogy(p, p) - p * log_q.masked_fill(p == 0, 0.0)).sum(dim=-1)
    losses = share[:, 0] * forward + (1 - share[:, 0]) * (1 - found)
    return losses, share * (q * p.sum(dim=-1, keepdim=True) - p) - (1 - share) * slope
