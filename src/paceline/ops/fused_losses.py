"""Output head and soft cross-entropy in one pass: neither the logits nor their gradient ever exist for all rows.

The slow twin is `losses.soft_cross_entropy(hidden @ weight.T, target=law)`; a test compares value and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 512  # rows at a time: 512 x 4096 floats are 8 MB; fewer rows cost more passes over the weight's gradient


def head_cross_entropy(
    hidden: Tensor, *, weight: Tensor, laws: Tensor, place: Tensor, row_weights: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_i w_i * (-sum_v p_i(v) log q_i(v)) with q_i = softmax(weight @ hidden_i) and p_i = laws[place_i].

    hidden: [n, H].  weight: [W, H].  laws: [m, W] float32, rows that sum to 1, fixed.  place: [n] int64 into laws.
    row_weights: [n] float32, fixed; a row of weight 0 gives no gradient.  labels: [n] int64 draft ids, -1 = none.
    Returns (sum: scalar float32, losses: [n] float32 without weights, detached, whether q is largest at label: [n]).
    """
    total, losses, hits = _HeadCrossEntropy.apply(hidden, weight, laws, place, row_weights, labels)  # type: ignore[misc]
    return total, losses, hits


@torch.no_grad()
def among_best(hidden: Tensor, *, weight: Tensor, labels: Tensor, count: int) -> Tensor:
    """Whether fewer than `count` tokens have a larger logit than the label, with logits = weight @ hidden.

    hidden: [n, H].  weight: [W, H].  labels: [n] int64 draft ids, -1 = none, which is never among them.  Returns [n]
    bool.
    """
    dtype = torch.get_autocast_dtype(hidden.device.type) if _is_autocast(hidden) else hidden.dtype
    found = torch.zeros_like(labels, dtype=torch.bool)
    with torch.autocast(hidden.device.type, enabled=False):
        rows, head = hidden.to(dtype), weight.to(dtype)
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            logits = rows[part] @ head.T
            chosen = logits.gather(1, labels[part, None].clamp_min(0))
            found[part] = ((logits > chosen).sum(dim=-1) < count) & (labels[part] >= 0)
    return found


class _HeadCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, where the chunk's logits are at hand, and scaled in the backward one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, laws: Tensor, place: Tensor, row_weights: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(hidden.device.type) if _is_autocast(hidden) else hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            rows, head = hidden.to(dtype), weight.to(dtype)
            grad_hidden = torch.empty_like(rows)
            # A borrowed head learns nothing, and a whole vocabulary's gradient is as large as the head.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            losses = hidden.new_empty(len(hidden), dtype=torch.float32)
            hits = torch.empty_like(labels, dtype=torch.bool)
            for start in range(0, len(rows), CHUNK):
                part = slice(start, start + CHUNK)
                logits = (rows[part] @ head.T).float()
                law = laws[place[part]]
                # argmax is several times slower than a maximum on a CPU
                chosen = logits.gather(1, labels[part, None].clamp_min(0))[:, 0]
                hits[part] = (chosen >= logits.amax(dim=-1)) & (labels[part] >= 0)
                log_sum = logits.logsumexp(dim=-1, keepdim=True)
                losses[part] = (log_sum - (law * logits).sum(dim=-1, keepdim=True))[:, 0]
                slope = logits.sub_(log_sum).exp_().sub_(law).mul_(row_weights[part, None]).to(dtype)
                grad_hidden[part] = slope @ head
                if grad_weight is not None:
                    grad_weight += slope.T @ rows[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(losses, hits)
        return (losses * row_weights).sum(), losses, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grads[0]
        return (
            (grad_hidden * scale.to(grad_hidden.dtype)).to(hidden_dtype),
            None if grad_weight is None else (grad_weight * scale).to(weight_dtype),
            None,
            None,
            None,
            None,
        )


def _is_autocast(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)
