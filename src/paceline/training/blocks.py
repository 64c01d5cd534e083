"""What a block draft would say behind given rows of a batch, as the same steps that an unroll gives.

Row t has its block at token t + 1, whose feature the decoder does not have yet: it sees the features up to t, and all
of its own block; blocks do not see each other.  Slot k of a block is step k - 1.  This module knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.drafts._base import Attend, BlockDraft
from paceline.training.collate import FEED, Rows, supervised
from paceline.training.objectives._base import TargetView, TrainingBatch
from paceline.training.unroll import UnrollStep

MOST_ROWS = 512  # blocks of a batch where rows are drawn; the published training has as many of each sequence
SCORES = 2**22  # attention scores of a head that are alive at once


def blocks(
    draft: BlockDraft, batch: TrainingBatch, target: TargetView, *, steps: int, seed: int | None, most: int
) -> Iterator[UnrollStep]:
    """Steps 0 to steps - 1: the first `steps` slots of the blocks.

    A block is always whole, whatever `steps` is: its slots see each other, and the decoder asks for whole ones.
    seed: from which `most` rows are drawn; None runs all.
    """
    rows = Rows.of(_drawn(supervised(batch.mask, step=0), seed=seed, most=most))
    features = draft.fuse(batch.taps)  # [B, T, Hd]
    places = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    context = draft.context(features, positions=places.expand(len(batch.ids), -1))
    parts = [
        _run(draft, batch, target, context, row=row, times=rows.time[part]).to(features.dtype)[:, 1 : steps + 1]
        for row, part in _parts(rows, count=len(batch.ids), length=len(places), size=draft.block_size)
    ]
    hidden = torch.cat(parts) if parts else features.new_zeros(0, steps, features.shape[-1])
    for step in range(steps):
        yield UnrollStep(step, rows, hidden[:, step], rows.take(supervised(batch.mask, step=step)))


def _drawn(active: Tensor, *, seed: int | None, most: int) -> Tensor:
    """At most `most` true entries of active [B, T] bool, each as likely as any other; the seed says which."""
    places = active.flatten().nonzero()[:, 0]
    if seed is None or len(places) <= most:
        return active
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:most]
    kept = torch.zeros_like(active).flatten()
    kept[places[order.to(places.device)]] = True
    return kept.view_as(active)


def _parts(rows: Rows, *, count: int, length: int, size: int) -> Iterator[tuple[int, slice]]:
    """Rows of one example, few enough for their scores: (example, its rows)."""
    most = max(1, SCORES // (size * (length + size)))
    start = 0
    for row, number in enumerate(torch.bincount(rows.batch, minlength=count).tolist()):  # sync
        for first in range(start, start + number, most):
            yield row, slice(first, min(first + most, start + number))
        start += number


def _run(
    draft: BlockDraft,
    batch: TrainingBatch,
    target: TargetView,
    context: list[tuple[Tensor, Tensor]],
    *,
    row: int,
    times: Tensor,
) -> Tensor:
    """Blocks behind rows `times` [m] of one example -> hidden [m, block_size, Hd]."""
    anchors = times + FEED
    ids = torch.full((len(times), draft.block_size), draft.mask_token_id, dtype=torch.int64, device=times.device)
    ids[:, 0] = batch.ids[row, anchors]
    positions = anchors[:, None] + torch.arange(draft.block_size, device=times.device)
    own = [(keys[row], values[row]) for keys, values in context]
    return draft.block(target.embed(ids).to(own[0][0].dtype), positions=positions, attend=_attention(own, times))


def _attention(context: list[tuple[Tensor, Tensor]], times: Tensor) -> Attend:
    """One softmax over an example's context up to each row's time and the row's own block.

    context: per layer two [A_kv, T, C].  times: [m] int64.
    """
    length = context[0][0].shape[1]
    hidden = torch.arange(length, device=times.device) > times[:, None]  # [m, T]
    hidden = hidden[:, None, None, None]

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        text_keys, text_values = context[layer]
        grouped = queries.unflatten(1, (keys.shape[1], -1)) * queries.shape[-1] ** -0.5  # [m, A_kv, G, n, C]
        text = torch.einsum("mkgnc,ktc->mkgnt", grouped, text_keys).float().masked_fill(hidden, -torch.inf)
        block = torch.einsum("mkgnc,mksc->mkgns", grouped, keys).float()
        weights = torch.cat([text, block], dim=-1).softmax(dim=-1).to(values.dtype)
        mixed = torch.einsum("mkgnt,ktc->mkgnc", weights[..., :length], text_values)
        mixed = mixed + torch.einsum("mkgns,mksc->mkgnc", weights[..., length:], values)
        return mixed.flatten(1, 2)

    return attend
