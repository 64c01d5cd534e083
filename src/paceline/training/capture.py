"""Runs the target over examples and stores its states, resumable and under a cap on the disk.

It knows neither drafts nor objectives; what a folder of features is belongs to `store.features`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline import __version__
from paceline.data.chat import ChatFormat, tokenizer_digest
from paceline.data.examples import Example
from paceline.errors import DataError
from paceline.store.feature_index import Fingerprint
from paceline.store.features import FeatureWriter
from paceline.store.fingerprint import weights_digest
from paceline.targets.generic import Target
from paceline.training.sources import target_states

ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """Where a capture stands: examples in the folder and in all, tokens found there, run in this session, its seconds.

    is_full: the cap on the disk was reached, and the rest is missing.
    """

    done: int
    total: int
    old_tokens: int
    new_tokens: int
    seconds: float
    is_full: bool = False


def feature_fingerprint(target: Target, *, chat: ChatFormat, dtype: str) -> Fingerprint:
    """Where features of this target, with its taps as they are set, come from.  dtype: as stored.

    The dtype in which the target runs is part of its name here: states of one target in two dtypes differ.
    """
    return Fingerprint(
        target=f"{weights_digest(target.model)}/{str(target.dtype).removeprefix('torch.')}",
        tokenizer=tokenizer_digest(chat.tokenizer),
        template=chat.template_digest(),
        taps=target.taps,
        hidden_size=target.hidden_size,
        dtype=dtype,
        version=__version__,
    )


def capture(
    target: Target,
    examples: Sequence[Example],
    *,
    writer: FeatureWriter,
    report: Callable[[CaptureProgress], None] = lambda progress: None,
) -> CaptureProgress:
    """Store the states of every example that the folder lacks; stop cleanly at the cap on the disk.

    Raises DataError naming the row whose states are NaN or infinite.
    """
    started = time.monotonic()
    wanted = {example.digest: example for example in examples}
    missing = sorted((row for row in wanted.values() if row.digest not in writer), key=lambda row: len(row.ids))
    old = sum(len(row.ids) for row in wanted.values()) - sum(len(row.ids) for row in missing)
    progress = CaptureProgress(len(wanted) - len(missing), len(wanted), old, 0, 0.0)
    place = 0
    while place < len(missing):
        rows = missing[place : place + ROWS_AT_ONCE]
        if not writer.fits(sum(len(row.ids) for row in rows)):
            rows = rows[:1]
        stored = _store(target, rows, writer=writer)
        place += stored
        tokens = progress.new_tokens + sum(len(row.ids) for row in rows[:stored])
        progress = CaptureProgress(progress.done + stored, progress.total, old, tokens, time.monotonic() - started)
        report(progress)
        if stored < len(rows):
            break
    writer.flush()
    return dataclasses.replace(progress, is_full=place < len(missing), seconds=time.monotonic() - started)


def _store(target: Target, rows: Sequence[Example], *, writer: FeatureWriter) -> int:
    """How many of the rows, from the first on, were stored: all, unless the disk's cap is reached."""
    if not writer.fits(len(rows[0].ids)):
        return 0
    for count, (row, (taps, hidden)) in enumerate(zip(rows, target_states(target, rows), strict=True)):
        if not writer.fits(len(row.ids)):
            return count
        try:
            writer.append(row, taps=taps, hidden=hidden)
        except DataError as error:
            raise DataError(f"{row.source}: {error}") from error
    return len(rows)
