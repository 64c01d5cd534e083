"""What a draft says along given paths, whatever kind of draft it is: the one view that objectives have of it.

A path starts behind a row of the batch and is given, token by token: the batch's own answers.  Step j holds what the
decoder's draft would say there after j accepted tokens.  This module knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.drafts._base import DraftNetwork, SequentialDraft
from paceline.errors import ConfigError
from paceline.training.objectives._base import TargetView, TrainingBatch
from paceline.training.unroll import UnrollStep, unroll


def guided(
    draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, steps: int, seed: int | None = None
) -> Iterator[UnrollStep]:
    """Steps 0 to steps - 1 behind the supervised rows of a batch.

    seed: from which a draft draws the rows it runs, where all of them would be too many; None runs all.
    Raises ConfigError for a draft that has no such steps.
    """
    if isinstance(draft, SequentialDraft):
        return unroll(draft, batch, target, steps=steps)
    raise ConfigError(f"{type(draft).__name__} is neither a sequential nor a block draft; it has no paths to train on")
