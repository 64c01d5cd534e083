"""The one rule that keeps speculative decoding lossless, for one node and its ordered children.

A chain is a node with one child, greedy is a one-hot law, and a ranked tree is a draft law that is certain (`q` is
None): no case has a branch of its own. It knows neither the tree nor where the laws come from; whoever walks the tree
calls `verify_children` once for each node on the way down (methods.md section 3).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.ops.sampling import draw, flip


def accept_probability(p: Tensor, *, q: Tensor | None, token: Tensor) -> Tensor:
    """Chance that the target keeps each proposed token: min(1, p / q), or p itself when `q` is None.

    p: [..., V] float, target law.  q: [..., V] float, the law that the token was drawn from, or None when the token is
    a fixed function of the context.  token: [...] int64.  Returns [...] float in [0, 1].
    """
    p_token = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    if q is None:
        return p_token.clamp(max=1.0)
    q_token = q.to(p.dtype).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    # min(p, q) / q rather than min(1, p / q): no overflow, and 0 / 0 is met by the clamp alone.
    return torch.minimum(p_token, q_token) / q_token.clamp(min=torch.finfo(p.dtype).tiny)


def without(law: Tensor, *, token: Tensor) -> Tensor:
    """The law with one token removed, renormalised; unchanged where nothing else has any mass.

    law: [..., V] float.  token: [...] int64.  Returns [..., V] float.
    """
    index = token.unsqueeze(-1)
    mass = law.gather(-1, index)
    if not mass.any():  # sync; the common case of a greedy walk, without a pass over the vocabulary
        return law
    rest = law.scatter(-1, index, 0.0)
    total = rest.sum(dim=-1, keepdim=True)
    rest /= total.clamp(min=torch.finfo(law.dtype).tiny)
    # Where nothing is left, the token was the whole law: put it back.
    return rest.scatter_(-1, index, torch.where(total > 0, 0.0, mass))


def residual(p: Tensor, *, q: Tensor | None, token: Tensor) -> Tensor:
    """The target law that is left once a proposed token has been rejected.

    Without `q`: p with the token removed.  With `q`: normalise(max(0, p - q)), and where rounding leaves nothing of
    that, p with the token removed.  Never NaN, and never mass where p has none.
    p: [..., V] float.  q: [..., V] float or None.  token: [...] int64.  Returns [..., V] float.
    """
    if q is None:
        return without(p, token=token)
    excess = (p - q.to(p.dtype)).clamp_(min=0.0)
    total = excess.sum(dim=-1, keepdim=True)
    has_mass = total > 0
    if has_mass.all():  # sync; almost always, and it saves two passes over the vocabulary
        return excess.div_(total)
    return torch.where(has_mass, excess / total.clamp(min=torch.finfo(p.dtype).tiny), without(p, token=token))


def after_rejection(p: Tensor, *, q: Tensor | None, token: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both laws for the next sibling once a child was not kept.

    With `accept_probability` it is exact for a fixed ordered list of children (`q` None), for one child drawn from
    `q`, and for children drawn from `q` one after the other without replacement.  It is not exact if drawn children
    were dropped for their values.
    p, q: [..., V] float.  token: [...] int64.  Returns (next p [..., V], next q [..., V] or None).
    """
    return residual(p, q=q, token=token), None if q is None else without(q, token=token)


def verify_children(
    p: Tensor, *, children: Sequence[int], q: Tensor | None, generator: torch.Generator
) -> tuple[int | None, int | None]:
    """Walk one node's children in order and stop at the first that is kept.

    p: [V] float, the target law after this node.  children: their tokens, in the order proposed; none for a leaf.
    q: [V] float, the law they were drawn from without replacement, or None for ranked children.
    Returns (index of the kept child, None), or (None, token drawn from what is left of p).  One coin for each child
    that is looked at and one draw if none is kept, also when the law is one-hot.
    """
    for index, child in enumerate(children):
        token = torch.tensor(child, device=p.device)
        if flip(accept_probability(p, q=q, token=token), generator=generator):
            return index, None
        p, q = after_rejection(p, q=q, token=token)  # only now: it is a pass over the vocabulary
    return None, int(draw(p, generator=generator))  # sync
