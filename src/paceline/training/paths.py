"""What a draft says along given paths, whatever kind of draft it is: the one view that objectives have of it.

A path starts behind a row of the batch and is given, token by token: the batch's own answers.  Step j holds what the
decoder's draft would say there after j accepted tokens.  This module knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.drafts._base import BlockDraft, DraftNetwork, SequentialDraft
from paceline.errors import ConfigError
from paceline.training.blocks import MOST_ROWS, blocks
from paceline.training.objectives._base import TargetView, TrainingBatch
from paceline.training.unroll import UnrollStep, unroll


def guided(
    draft: DraftNetwork,
    batch: TrainingBatch,
    target: TargetView,
    *,
    steps: int,
    seed: int | None = None,
    most: int = MOST_ROWS,
) -> Iterator[UnrollStep]:
    """Steps 0 to steps - 1 behind the supervised rows of a batch.

    seed: from which a block draft draws the `most` rows it runs, since each costs a block; None runs all.
    Raises ConfigError for a draft that has no such steps, or not so many.
    """
    refuse_steps(draft, steps=steps, key="steps")
    if isinstance(draft, SequentialDraft):
        return unroll(draft, batch, target, steps=steps)
    if isinstance(draft, BlockDraft):
        return blocks(draft, batch, target, steps=steps, seed=seed, most=most)
    raise ConfigError(f"{type(draft).__name__} is neither a sequential nor a block draft; it has no paths to train on")


def refuse_steps(draft: object, *, steps: int, key: str) -> None:
    """Raises ConfigError naming the recipe's key where a draft's block ends before so many tokens."""
    if isinstance(draft, BlockDraft) and steps > draft.block_size - 1:
        raise ConfigError(
            f"{key} is {steps}; a block of {draft.block_size} says {draft.block_size - 1} tokens behind the known one: "
            f"lower {key}, or train a draft with a larger draft.options.block_size"
        )
