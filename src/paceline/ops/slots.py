"""What each slot of a block counts for in a loss: early ones more, since a later one matters only once they are right.

Slot k (1 to S) predicts the token k places behind the known one.  All weights are fixed numbers without gradient; what
is not supervised counts nothing, and neither does it help a later slot.  This module knows no network.
"""

import torch
from torch import Tensor


def even(active: Tensor) -> Tensor:
    """Every supervised slot the same: active [n, S] bool -> [n, S] float32."""
    return active.float()


def decaying(active: Tensor, *, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma), DFlash's fixed decay: active [n, S] bool, gamma > 0 -> [n, S] float32."""
    slot = torch.arange(active.shape[1], dtype=torch.float32, device=active.device)
    return active.float() * (-slot / gamma).exp()


def pace(chance: Tensor, *, active: Tensor, alpha: float) -> Tensor:
    """D-PACE: sum over i >= k of P_i with P_i = s_1 ... s_i and s_i = (1 - alpha) q_i(label) + alpha.

    It is the slope of sum_i P_i, a smoothed accepted length, in log s_k.  chance: [n, S] float, q_k(label) in [0, 1].
    active: [n, S] bool.  alpha: in [0, 1], keeps late slots alive while early ones are wrong.
    Returns [n, S] float32.
    """
    survival = ((1.0 - alpha) * chance.detach().float() + alpha).masked_fill(~active, 0.0).cumprod(dim=1)
    return active.float() * survival.flip(1).cumsum(dim=1).flip(1)


def until_failure(hits: Tensor, *, active: Tensor) -> Tensor:
    """Accept until fail: 1 up to and including the first slot that is predicted wrongly, 0 behind it.

    hits, active: [n, S] bool.  Returns [n, S] float32.
    """
    right = (hits & active).long().cumprod(dim=1)
    reached = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=1)
    return active.float() * reached
