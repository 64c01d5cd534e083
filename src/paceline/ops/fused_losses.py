"""Output head and loss in one pass: the gradient of the logits never exists for all rows.

The slow twins are the losses of `losses.py` on `hidden @ weight.T`; tests compare value and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 512  # rows at a time: 512 x 4096 floats are 8 MB; fewer rows cost more passes over the weight's gradient


Rule = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logits [m, W] float32, its own; which rows) -> (losses [m], d losses / d logits [m, W]), weights included."""


def head_rule(hidden: Tensor, *, weight: Tensor, rule: Rule, logits: Tensor | None = None) -> Tensor:
    """The sum of a rule's losses over all rows, scalar float32, with gradients to hidden and weight.

    hidden: [n, H].  weight: [W, H].  logits: [n, W], what `head_logits` said of the same two; None makes a chunk at a
    time, and they never exist for all rows.
    """
    return _HeadRule.apply(hidden, weight, rule, logits)  # type: ignore[no-any-return]


@torch.no_grad()
def head_logits(hidden: Tensor, *, weight: Tensor) -> Tensor:
    """hidden [n, H], weight [W, H] -> logits [n, W] in the dtype of products, without a gradient."""
    dtype = _product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden.to(dtype) @ weight.to(dtype).T


def head_cross_entropy(
    hidden: Tensor, *, weight: Tensor, laws: Tensor, place: Tensor, row_weights: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_i w_i * (-sum_v p_i(v) log q_i(v)) with q_i = softmax(weight @ hidden_i) and p_i = laws[place_i].

    hidden: [n, H].  weight: [W, H].  laws: [m, W] float32, rows that sum to 1, fixed.  place: [n] int64 into laws.
    row_weights: [n] float32, fixed; a row of weight 0 gives no gradient.  labels: [n] int64 draft ids, -1 = none.
    Returns (sum: scalar float32, losses: [n] float32 without weights, detached, whether q is largest at label: [n]).
    """
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    hits = torch.empty_like(labels, dtype=torch.bool)

    def rule(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        law, scale = laws[place[part]], row_weights[part, None]
        # argmax is several times slower than a maximum on a CPU
        chosen = logits.gather(1, labels[part, None].clamp_min(0))[:, 0]
        hits[part] = (chosen >= logits.amax(dim=-1)) & (labels[part] >= 0)
        log_sum = logits.logsumexp(dim=-1, keepdim=True)
        losses[part] = (log_sum - (law * logits).sum(dim=-1, keepdim=True))[:, 0]
        return losses[part] * scale[:, 0], logits.sub_(log_sum).exp_().sub_(law).mul_(scale)

    return head_rule(hidden, weight=weight, rule=rule), losses, hits


def head_label_losses(hidden: Tensor, *, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-log q_i(label_i) with q_i = softmax(weight @ hidden_i), each row's own, so that weights may depend on them.

    Logits exist a chunk at a time and are made again in the backward pass.
    hidden: [n, H].  weight: [W, H].  labels: [n] int64 ids, -1 = none, whose loss is 0.
    Returns (losses: [n] float32, whether q is largest at label: [n] bool).
    """

    def part(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(rows, weight).float()
        chosen = logits.gather(1, wanted[:, None].clamp_min(0))[:, 0]
        known = wanted >= 0
        losses = (logits.logsumexp(dim=-1) - chosen).masked_fill(~known, 0.0)
        return losses, (chosen >= logits.amax(dim=-1)) & known

    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, max(len(hidden), 1), CHUNK):
        rows, wanted = hidden[start : start + CHUNK], labels[start : start + CHUNK]
        found.append(checkpoint(part, rows, wanted, use_reentrant=False))  # type: ignore[arg-type]
    return torch.cat([losses for losses, _ in found]), torch.cat([hits for _, hits in found])


@torch.no_grad()
def among_best(hidden: Tensor, *, weight: Tensor, labels: Tensor, count: int) -> Tensor:
    """Whether fewer than `count` tokens have a larger logit than the label, with logits = weight @ hidden.

    hidden: [n, H].  weight: [W, H].  labels: [n] int64 draft ids, -1 = none, which is never among them.  Returns [n]
    bool.
    """
    dtype = _product_dtype(hidden)
    found = torch.zeros_like(labels, dtype=torch.bool)
    with torch.autocast(hidden.device.type, enabled=False):
        rows, head = hidden.to(dtype), weight.to(dtype)
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            found[part] = is_among_best(rows[part] @ head.T, labels=labels[part], count=count)
    return found


def is_among_best(logits: Tensor, *, labels: Tensor, count: int) -> Tensor:
    """As `among_best`, of logits [m, W] that are there: [m] bool."""
    chosen = logits.gather(1, labels[:, None].clamp_min(0))
    return ((logits > chosen).sum(dim=-1) < count) & (labels >= 0)


class _HeadRule(torch.autograd.Function):
    """Gradients are made in the forward pass, where the chunk's logits are at hand, and scaled in the backward one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rule: Rule, logits: Tensor | None) -> Tensor:
        dtype = _product_dtype(hidden) if logits is None else logits.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            rows, head = hidden.to(dtype), weight.to(dtype)
            grad_hidden = torch.empty_like(rows)
            # A borrowed head learns nothing, and a whole vocabulary's gradient is as large as the head.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            total = hidden.new_zeros((), dtype=torch.float32)
            for start in range(0, len(rows), CHUNK):
                part = slice(start, start + CHUNK)
                said = rows[part] @ head.T if logits is None else logits[part]
                losses, slope = rule(said.to(torch.float32, copy=logits is not None), part)
                total += losses.sum()
                slope = slope.to(dtype)
                grad_hidden[part] = slope @ head
                if grad_weight is not None:
                    grad_weight += slope.T @ rows[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grads[0]
        return (
            (grad_hidden * scale.to(grad_hidden.dtype)).to(hidden_dtype),
            None if grad_weight is None else (grad_weight * scale).to(weight_dtype),
            None,
            None,
        )


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """What products are computed in: autocast's dtype where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
