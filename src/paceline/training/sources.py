"""Where a batch gets the target's states from: the target itself (online) or a folder of captured features.

Both give the same batch, bit for bit in float32 on a CPU.  No token is shifted here, and no draft is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.data.examples import Example
from paceline.errors import DataError
from paceline.store.features import FeatureReader
from paceline.targets.generic import Target
from paceline.training.collate import pad_examples
from paceline.training.objectives._base import TrainingBatch

States = tuple[Tensor, Tensor]
"""(taps [T, K*H], hidden [T, H]) of one example."""


class FeatureSource(Protocol):
    """Turns examples into a batch."""

    def batch(self, examples: Sequence[Example]) -> TrainingBatch:
        """Examples padded on the right with zeros, on the training device, with the target's states."""
        ...


class OnlineFeatures:
    """Runs the target on every batch.

    dtype: of the taps that the draft reads.  The target runs in its own.
    """

    def __init__(self, target: Target, *, dtype: torch.dtype) -> None:
        self._target, self._dtype = target, dtype

    def batch(self, examples: Sequence[Example]) -> TrainingBatch:
        """As FeatureSource.batch."""
        states = target_states(self._target, examples)
        return pad_states(examples, states, dtype=self._dtype, device=self._target.device)


class CapturedFeatures:
    """Reads what `paceline capture` wrote.

    dtype: of the taps that the draft reads, whatever is stored.  Raises DataError when examples were not captured.
    """

    def __init__(self, reader: FeatureReader, *, dtype: torch.dtype, device: torch.device) -> None:
        self._reader, self._dtype, self._device = reader, dtype, device

    def require(self, examples: Sequence[Example]) -> None:
        """Refuse a run before it begins when some of its examples are not in the folder."""
        absent = [example for example in examples if example.digest not in self._reader]
        if absent:
            raise DataError(
                f"{self._reader.folder}: no features for {len(absent)} of {len(examples)} examples, first "
                f"{absent[0].source}; run `paceline capture` with this recipe again"
            )

    def batch(self, examples: Sequence[Example]) -> TrainingBatch:
        """As FeatureSource.batch.  Raises CheckpointError naming a shard that is not what was captured."""
        rows = [self._reader.row(example.digest) for example in examples]
        states = [(row.taps, row.hidden) for row in rows]
        return pad_states(examples, states, dtype=self._dtype, device=self._device)


def target_states(target: Target, examples: Sequence[Example]) -> list[States]:
    """The target's states of each example, on its device and in its dtype.

    On a CPU one example at a time: its states are then a function of the example alone, bit for bit, no padding is
    computed, and rows of 200 tokens were 1.3 times faster than a padded batch of four (one core, 135 M parameters).
    Elsewhere the whole batch in one call, padded on the right, which a causal model does not see.
    """
    if target.device.type == "cpu":
        return [_states(target, example.ids[None])[0] for example in examples]
    ids, _, _ = pad_examples(examples)
    whole = _states(target, ids.to(target.device))
    return [
        (taps[: len(example.ids)], hidden[: len(example.ids)])
        for example, (taps, hidden) in zip(examples, whole, strict=True)
    ]


def _states(target: Target, ids: Tensor) -> list[States]:
    scores = target.full_forward(ids)
    assert scores.taps is not None and scores.hidden is not None, "the target has no taps set"
    return list(zip(scores.taps, scores.hidden, strict=True))


def pad_states(
    examples: Sequence[Example], states: Sequence[States], *, dtype: torch.dtype, device: torch.device
) -> TrainingBatch:
    """A batch of examples and their states, zeros behind the end of each.

    dtype: of the taps; the last hidden states keep theirs, since the target's head takes them.
    """
    ids, mask, lengths = pad_examples(examples)
    taps = torch.zeros(*ids.shape, states[0][0].shape[-1], dtype=dtype, device=device)
    hidden = torch.zeros(*ids.shape, states[0][1].shape[-1], dtype=states[0][1].dtype, device=device)
    for row, (tapped, last) in enumerate(states):
        taps[row, : len(tapped)] = tapped
        hidden[row, : len(last)] = last
    return TrainingBatch(ids.to(device), mask.to(device), lengths.to(device), taps, hidden)


class FrozenTarget:
    """The target's embedding and head for objectives, in the target's own dtype even where autocast is on."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        return self._target.embed(ids)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """[..., H] of any float dtype -> [..., V] logits."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self._target.head(hidden.to(self._target.dtype))
