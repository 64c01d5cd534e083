"""Multi-step teacher-forced unrolling: what the draft would compute after j accepted tokens, for all rows at once.

EAGLE-3's training-time test (arXiv 2503.01840): the query of step j at row t sees the step-0 keys up to t and, of each
later step, the key of its own row; positions are t + j.  Only rows that a loss needs are run; all have step-0 keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafts._base import SequentialDraft
from paceline.training.collate import FEED, Rows, supervised
from paceline.training.objectives._base import TargetView, TrainingBatch


@dataclass(frozen=True, slots=True)
class UnrollStep:
    """Step j of an unroll.

    rows: the draft rows that run (the same in every step).  hidden: [n, Hd or wider], what `head_input` takes.
    active: [n] bool, rows that are trained in this step.
    """

    step: int
    rows: Rows
    hidden: Tensor
    active: Tensor


def unroll(
    draft: SequentialDraft, batch: TrainingBatch, target: TargetView, *, steps: int, is_chained: bool = True
) -> Iterator[UnrollStep]:
    """Steps 0 to steps - 1 of a batch, fed with the batch's own tokens.

    is_chained: whether a step's gradient flows into the steps whose features it is fed; without it a feature is given,
    as the target's are, and every step is trained for itself.
    """
    rows = Rows.of(supervised(batch.mask, step=0))
    fused = draft.fuse(batch.taps)  # [B, T, Hd]
    keys, values = _context(draft, batch, target, fused)
    features = rows.take(fused)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for step in range(steps):
        embeds = target.embed(rows.take(batch.ids, ahead=FEED + step)).to(features.dtype)
        inputs, residual = draft.enter(embeds, features)
        inputs = inputs[None]  # [1, n, in]
        cos, sin = draft.tables((rows.time + step)[None])
        queries = draft.attention.queries(inputs, cos=cos, sin=sin)[0]  # [A, n, C]
        if step:
            key, value = draft.attention.keys_values(inputs, cos=cos, sin=sin)
            own_keys.append(key[0])  # [A_kv, n, C]
            own_values.append(value[0])
        mixed = _attend(queries, keys, values, own_keys, own_values, rows)
        hidden = draft.finish(residual, draft.attention.project(mixed[None])[0])
        onward = draft.onward(hidden)
        features = onward if is_chained else onward.detach()
        yield UnrollStep(step, rows, hidden, rows.take(supervised(batch.mask, step=step)))


def _context(draft: SequentialDraft, batch: TrainingBatch, target: TargetView, fused: Tensor) -> tuple[Tensor, Tensor]:
    """Step-0 keys and values of every position, [B, A_kv, T, C] each; the last is fed a stand-in no row sees."""
    fed = torch.cat([batch.ids[:, FEED:], batch.ids[:, -FEED:]], dim=1)
    positions = torch.arange(batch.ids.shape[1], device=fed.device).expand_as(fed)
    cos, sin = draft.tables(positions)
    inputs, _ = draft.enter(target.embed(fed).to(fused.dtype), fused)
    return draft.attention.keys_values(inputs, cos=cos, sin=sin)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor], rows: Rows
) -> Tensor:
    """One softmax over the step-0 keys up to each row's position and the row's own later keys.

    queries: [A, n, C].  keys, values: [B, A_kv, T, C].  own_*: per later step [A_kv, n, C].  Returns [A, n, C].
    """
    heads, _count, width = queries.shape
    batch, kv_heads, length, _ = keys.shape
    groups = heads // kv_heads
    grouped = queries.unflatten(0, (kv_heads, groups))  # [A_kv, G, n, C]
    scale = width**-0.5
    text = _padded(grouped * scale, rows, batch)  # [B, A_kv, G * R, C]
    scores = torch.matmul(text, keys.transpose(-1, -2)).unflatten(2, (groups, rows.width)).float()  # [B, A_kv, G, R, T]
    time = torch.zeros(batch * rows.width, dtype=rows.time.dtype, device=rows.time.device)
    time = time.index_copy(0, rows.place, rows.time).view(batch, rows.width)
    hidden_keys = torch.arange(length, device=time.device) > time[:, :, None]  # [B, R, T]
    scores = scores.masked_fill(hidden_keys[:, None, None], -torch.inf)
    if own_keys:
        own = (
            torch.stack([(grouped * key[:, None]).sum(-1) for key in own_keys], dim=-1).float() * scale
        )  # [A_kv, G, n, j]
        scores = torch.cat([scores, _padded_scores(own, rows, batch)], dim=-1)
    weights = scores.softmax(dim=-1).to(values.dtype)
    mixed = torch.matmul(weights[..., :length].flatten(2, 3), values)  # [B, A_kv, G * R, C]
    mixed = _flat(mixed.unflatten(2, (groups, rows.width)), rows)  # [A_kv, G, n, C]
    for index, value in enumerate(own_values):
        share = _flat(weights[..., length + index : length + index + 1], rows)  # [A_kv, G, n, 1]
        mixed = mixed + share * value[:, None]
    return mixed.flatten(0, 1)


def _padded(grouped: Tensor, rows: Rows, batch: int) -> Tensor:
    """[A_kv, G, n, C] flat rows -> [B, A_kv, G * R, C] with zeros in the gaps."""
    kv_heads, groups, _count, width = grouped.shape
    flat = grouped.new_zeros(kv_heads, groups, batch * rows.width, width).index_copy(2, rows.place, grouped)
    return flat.view(kv_heads, groups, batch, rows.width, width).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _padded_scores(own: Tensor, rows: Rows, batch: int) -> Tensor:
    """[A_kv, G, n, j] -> [B, A_kv, G, R, j]."""
    kv_heads, groups, _count, later = own.shape
    flat = own.new_zeros(kv_heads, groups, batch * rows.width, later).index_copy(2, rows.place, own)
    return flat.view(kv_heads, groups, batch, rows.width, later).permute(2, 0, 1, 3, 4)


def _flat(padded: Tensor, rows: Rows) -> Tensor:
    """[B, A_kv, G, R, C] -> [A_kv, G, n, C], the rows that exist."""
    return padded.permute(1, 2, 0, 3, 4).flatten(2, 3).index_select(2, rows.place)
