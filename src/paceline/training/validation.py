"""How good a draft is: simulated accepted length on rows that it does not train on, shared out over the processes.

The target's states of these rows are kept in memory when they are small.  No option of decoding is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from paceline.data.batching import plan_epoch
from paceline.data.examples import Example
from paceline.drafts._base import DraftNetwork
from paceline.training.objectives._base import TargetView, TrainingBatch
from paceline.training.simulate import accepted_length
from paceline.training.sources import FeatureSource

KEPT_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Score:
    """Accepted length with the target's own token (1 = nothing is accepted), its standard error over rounds, rounds."""

    accepted_length: float
    standard_error: float
    rounds: int


def taught_length(averages: Mapping[str, float | None]) -> float | None:
    """The accepted length that the guesses on the training rows promise: 1 + a_0 + a_0 a_1 + ...

    averages: of a log line; a_j is `accuracy_j`, how often unroll step j guesses the target's choice.  None without it.
    """
    length, reached, step = 1.0, 1.0, 0
    while (right := averages.get(f"accuracy_{step}")) is not None:
        reached *= right
        length, step = length + reached, step + 1
    return length if step else None


class Validator:
    """Scores a draft on the same rows every time.

    examples: of all processes; each takes its share.  depth: drafted tokens in a round.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        source: FeatureSource,
        target: TargetView,
        accelerator: Accelerator,
        depth: int,
        max_tokens: int,
        is_bf16: bool,
    ) -> None:
        lengths = [len(example.ids) for example in examples]
        batches = plan_epoch(lengths, epoch=0, seed=0, max_tokens=max(max_tokens, max(lengths)))
        share = batches[accelerator.process_index :: accelerator.num_processes]
        self._batches = [[examples[index] for index in batch] for batch in share]
        self._source, self._target, self._accelerator = source, target, accelerator
        self._depth, self._is_bf16 = depth, is_bf16
        self._kept: list[TrainingBatch] = []
        self._is_kept = False

    def score(self, draft: DraftNetwork) -> Score:
        """Every process must call it; all get the same score."""
        device = self._accelerator.device
        draft.eval()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._is_bf16):
            mean, rounds, error = accepted_length(draft, self._states(), self._target, depth=self._depth)
        draft.train()
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.tensor([mean * rounds, rounds, (error * rounds) ** 2], dtype=dtype, device=device)
        reduced = self._accelerator.reduce(sums, "sum")
        assert isinstance(reduced, torch.Tensor)
        emitted, total, variance = reduced.tolist()  # sync
        if not total:
            return Score(1.0, 0.0, 0)
        return Score(emitted / total, variance**0.5 / total, int(total))

    def _states(self) -> Iterator[TrainingBatch]:
        if self._is_kept:
            yield from self._kept
            return
        kept: list[TrainingBatch] = []
        size = 0
        for examples in self._batches:
            batch = self._source.batch(examples)
            size += batch.taps.nbytes + batch.hidden.nbytes
            if size <= KEPT_BYTES:
                kept.append(batch)
            yield batch
        self._is_kept = size <= KEPT_BYTES
        self._kept = kept if self._is_kept else []
