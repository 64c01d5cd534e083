"""From logits to a law, and from a law to tokens.

It knows nothing of who asks: target and draft laws go through the same functions, so that `p` and `q` are always
measured after the same filters. Randomness comes from the caller's generator and from nowhere else.
"""

import math

import torch
from torch import Tensor

from paceline.errors import ConfigError

# Below this a temperature means "greedy": 1 / 1e-5 would overflow nothing in float32, but no draw could tell the
# resulting law from the one-hot limit. The same threshold as the published EAGLE decoder.
GREEDY_TEMPERATURE = 1e-5
BLOCK = 512  # scores of a row whose maximum is taken together


def is_greedy(temperature: float) -> bool:
    """Whether a temperature stands for the argmax limit.  Raises ConfigError for a negative or non-finite one."""
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ConfigError(f"temperature is {temperature}; expected a finite number >= 0 (0 means greedy)")
    return temperature < GREEDY_TEMPERATURE


def probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The law that a sampler with these filters draws from.

    logits: [..., V] floating; -inf marks a forbidden token and every row keeps at least one finite entry.
    temperature: below 1e-5 gives the limit, a one-hot row at the first largest logit (the filters cannot change it).
    top_k: keep the k largest and whatever ties with the k-th; None or 0 keeps all.
    top_p: keep the smallest set of most likely tokens that holds this mass, at least one; None or 1 keeps all.
    Order, ties and edges are those of transformers' warpers: temperature, then top-k, then top-p.
    Returns [..., V] float32, or float64 for float64 logits.  Raises ConfigError for a value outside its range.
    """
    _check_filters(top_k=top_k, top_p=top_p)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if is_greedy(temperature):
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0)
    scores = scores / temperature
    if top_k:
        scores = _keep_top_k(scores, top_k=top_k)
    if top_p is not None and top_p < 1.0:
        scores = _keep_top_p(scores, top_p=top_p)
    return scores.softmax(dim=-1)


def _check_filters(*, top_k: int | None, top_p: float | None) -> None:
    if top_k is not None and top_k < 0:
        raise ConfigError(f"top_k is {top_k}; expected a whole number >= 1, or none (0) to keep every token")
    if top_p is not None and not 0.0 <= top_p <= 1.0:
        raise ConfigError(f"top_p is {top_p}; expected a number from 0 to 1")


def _keep_top_k(scores: Tensor, *, top_k: int) -> Tensor:
    kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf)


def _keep_top_p(scores: Tensor, *, top_p: float) -> Tensor:
    # Ascending and cumulative from the tail, as transformers does it: the other direction would round the boundary
    # token differently, and the support must be the same.
    ascending, order = scores.sort(dim=-1, descending=False)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    removed[..., -1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -torch.inf)


def first_best(scores: Tensor) -> Tensor:
    """`scores.argmax(dim=-1)`, the first of equals, [B, V] -> [B] int64.

    torch compares one number at a time to find a place, but many to find a maximum: for [96, 49152] in bfloat16 the
    maxima of blocks and then one block take 3 ms, argmax 22.
    """
    count = scores.shape[-1]
    whole = count - count % BLOCK
    if whole == 0:
        return scores.argmax(dim=-1)
    peaks = scores[:, :whole].unflatten(-1, (-1, BLOCK)).amax(dim=-1)
    if whole < count:
        peaks = torch.cat([peaks, scores[:, whole:].amax(dim=-1, keepdim=True)], dim=-1)
    # The last block may begin inside the one before, which then holds nothing as large.
    start = (peaks.argmax(dim=-1) * BLOCK).clamp_max(count - BLOCK)
    block = scores.gather(-1, start[:, None] + torch.arange(BLOCK, device=scores.device))
    return start + block.argmax(dim=-1)


def flip(probability: Tensor, *, generator: torch.Generator) -> bool:
    """One coin.  probability: [] float in [0, 1].  0 is never true and 1 always is."""
    uniform = torch.rand((), generator=generator, dtype=torch.float64, device=generator.device)
    return float(uniform) < float(probability)  # sync


def draw(probs: Tensor, *, generator: torch.Generator) -> Tensor:
    """One token for each law, by inverse CDF from one uniform each.

    probs: [..., V] float, non-negative with a positive sum; it need not be normalised.
    Returns [...] int64.  A token of probability 0 is never drawn.
    """
    shape = probs.shape[:-1]
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device).to(probs.device)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    # u is at most 1 - 2^-53, so that the product, rounded, stays below the total.
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    # The first running sum above the threshold: a token without mass does not raise the sum, so it is never the first.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def draw_without_replacement(probs: Tensor, *, count: int, generator: torch.Generator) -> Tensor:
    """An ordered draw of distinct tokens: each from the law with the earlier ones removed and renormalised.

    probs: [..., V] float.  count: how many.
    Returns [..., count] int64 in the order drawn; -1 once a row's support is used up.
    """
    left = probs.clone()
    tokens: list[Tensor] = []
    for _ in range(count):
        token = draw(left, generator=generator)
        is_spent = left.sum(dim=-1) <= 0
        tokens.append(token.masked_fill(is_spent, -1))
        left.scatter_(-1, token.masked_fill(is_spent, 0).unsqueeze(-1), 0.0)
    if not tokens:
        return torch.empty((*probs.shape[:-1], 0), dtype=torch.int64, device=probs.device)
    return torch.stack(tokens, dim=-1)
