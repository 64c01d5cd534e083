"""An epoch as batches of rows of similar length: padding stays small, and seed and epoch number fix the order.

This policy file knows no tensors, no model and no files. A plan is a pure function of its arguments, so a position
inside an epoch is a plain integer: to resume, build the same plan and skip that many batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.errors import ConfigError, DataError

MAX_PADDING = 0.08
"""Share of padding at which a batch is closed; below the 10 % that the whole epoch must keep."""


def plan_epoch(
    lengths: Sequence[int],
    *,
    epoch: int,
    seed: int,
    max_tokens: int,
    max_rows: int | None = None,
    max_padding: float = MAX_PADDING,
) -> tuple[tuple[int, ...], ...]:
    """Indices of every row exactly once, in batches, in the order of training.

    lengths: tokens of each row.  max_tokens: rows x longest row of a batch.  max_rows: cap on rows, or None.
    max_padding: a batch is closed before its share of padding would exceed this.
    Equal lengths change places from epoch to epoch and so does the order of batches; their number and sizes never do.
    Raises ConfigError when the longest row exceeds `max_tokens`, DataError when there is no row.
    """
    if not lengths:
        raise DataError("no rows to batch; expected at least one example")
    if max(lengths) > max_tokens:
        raise ConfigError(
            f"a row of {max(lengths)} tokens exceeds a batch of {max_tokens}; raise it or lower max_length"
        )
    generator = random.Random(f"paceline/{seed}/{epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    order.sort(key=lambda index: -lengths[index])  # stable: equal lengths stay shuffled; the longest row opens a batch
    batches: list[list[int]] = []
    used = 0
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        area = longest * (len(batches[-1]) + 1) if batches else 0
        is_full = not batches or area > max_tokens or (max_rows is not None and len(batches[-1]) >= max_rows)
        if is_full or area - used - lengths[index] > max_padding * area:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += lengths[index]
    generator.shuffle(batches)
    return tuple(tuple(batch) for batch in batches)


def padding_share(lengths: Sequence[int], *, batches: Sequence[Sequence[int]]) -> float:
    """Share of padding among all tokens of these batches, in [0, 1)."""
    area = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    return 1.0 - sum(lengths[index] for batch in batches for index in batch) / area
