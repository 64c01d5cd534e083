"""The single place where tokens, features and labels are shifted against each other.

Draft row t pairs the target's features at t with the embedding of token t + 1 and predicts token t + 2; in unroll step
j everything but the features moves j further.  A row is trained only where decoding would use it: the token it is fed
and every token up to the one it predicts belong to the same answer (the published masks are off by one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.examples import Example

FEED = 1  # step 0 is fed token t + 1
PREDICT = 2  # and predicts token t + 2


def pad_examples(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Examples as (ids [B, T] int64, mask [B, T] bool, lengths [B] int64), padded with 0 / False on the right."""
    lengths = torch.tensor([len(example.ids) for example in examples])
    ids = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        mask[row, : len(example.mask)] = example.mask
    return ids, mask, lengths


def supervised(mask: Tensor, *, step: int) -> Tensor:
    """Which draft rows t are trained in unroll step j: mask [B, T] bool -> [B, T] bool.

    True where tokens t + 1 (fed at step 0) to t + 2 + j (predicted) all belong to one answer.
    """
    active = shifted(mask, FEED)
    for ahead in range(PREDICT, PREDICT + step + 1):
        active = active & shifted(mask, ahead)
    return active


def shifted(values: Tensor, ahead: int) -> Tensor:
    """values[:, t + ahead] at t, zero behind the end: [B, T, ...] -> same shape."""
    result = torch.zeros_like(values)
    if ahead < values.shape[1]:
        result[:, : values.shape[1] - ahead] = values[:, ahead:]
    return result


@dataclass(frozen=True, slots=True)
class Rows:
    """Draft rows as flat indices: row i is position `time[i]` of example `batch[i]`.

    place: [n] int64 index into [B, R] where R = `width` is the most rows of one example, for padded attention.
    """

    batch: Tensor
    time: Tensor
    place: Tensor
    width: int

    @classmethod
    def of(cls, active: Tensor) -> Rows:
        """The true entries of active [B, T] bool, in order."""
        batch, time = active.nonzero(as_tuple=True)
        counts = active.sum(dim=1)
        width = max(int(counts.max()), 1)
        within = (active.cumsum(dim=1) - 1)[batch, time]
        return cls(batch, time, batch * width + within, width)

    def take(self, values: Tensor, *, ahead: int = 0) -> Tensor:
        """values[b, t + ahead] of each row: [B, T, ...] -> [n, ...]; t + ahead is clamped to the last position."""
        return values[self.batch, (self.time + ahead).clamp_max(values.shape[1] - 1)]


def table(ids: Tensor, mask: Tensor, *, steps: int) -> list[dict[str, int]]:
    """What a single example trains, for people: one entry per (step, row) with input id, feature index, label, weight.

    ids, mask: [T].  Weight is 1 where the row is trained, 0 elsewhere.
    """
    rows: list[dict[str, int]] = []
    for step in range(steps):
        active = supervised(mask[None], step=step)[0]
        for time in range(len(ids) - PREDICT - step):
            rows.append(
                {
                    "step": step,
                    "row": time,
                    "input": int(ids[time + FEED + step]),
                    "feature": time,
                    "label": int(ids[time + PREDICT + step]),
                    "weight": int(active[time]),
                }
            )
    return rows
