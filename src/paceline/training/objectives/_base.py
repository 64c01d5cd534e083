"""What the trainer knows of an objective: which draft and batch it takes, and that it returns loss terms.

Objectives are not methods of drafts: every objective runs with every draft for which it is defined, and refuses the
others by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.config import Section
from paceline.drafts._base import DraftNetwork
from paceline.records import LossTerms


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Examples padded on the right, with what the frozen target says of them.

    ids: [B, T] int64.  mask: [B, T] bool, True on tokens that the assistant wrote.  lengths: [B] int64.
    taps: [B, T, K*H] tapped layer outputs.  hidden: [B, T, H], last hidden state after the target's final norm.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor
    taps: Tensor
    hidden: Tensor


class TargetView(Protocol):
    """The part of a frozen target that objectives use; gradients never flow into it."""

    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] logits."""
        ...


class ObjectiveConfig(Section):
    """Base of every objective's options: strict, frozen, stored with the recipe."""


class Objective(Protocol):
    """One way to train a draft."""

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """Loss terms of a batch; `step` is the optimiser step, for schedules and for seeding what is drawn."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """An objective that learns something of its own from the batches; a run's state has it, for each process."""

    def state(self) -> Tensor:
        """[k] float64, k the same at all times."""
        ...

    def load(self, state: Tensor) -> None:
        """Put back what `state` returned."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectivePlugin:
    """What a file in this folder exports as PLUGIN.

    config: type of the options.  build: (options, draft) -> objective; raises ConfigError for a draft it is not
    defined for, naming both.
    """

    config: type[ObjectiveConfig]
    build: Callable[[ObjectiveConfig, object], Objective]
