"""Simulated accepted length: what greedy chain decoding would accept on answers that the target itself wrote.

Teacher forcing along a greedy answer computes exactly what the decoder's draft computes while its guesses are right, so
walking the matches round by round gives the decoder's own count without decoding (by test).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.drafts._base import DraftNetwork
from paceline.training.collate import PREDICT
from paceline.training.objectives._base import TargetView, TrainingBatch
from paceline.training.paths import guided


@torch.no_grad()
def accepted_length(
    draft: DraftNetwork, batches: Iterable[TrainingBatch], target: TargetView, *, depth: int
) -> tuple[float, int, float]:
    """(L with the bonus token, rounds, standard error over rounds) of a chain of `depth` on the batches' answers."""
    runs: list[int] = []
    for batch in batches:
        runs += _rounds(draft, batch, target, depth)
    if not runs:
        return 0.0, 0, 0.0
    lengths = torch.tensor(runs, dtype=torch.float64)
    error = float(lengths.std(correction=1)) / len(runs) ** 0.5 if len(runs) > 1 else 0.0
    return float(lengths.mean()), len(runs), error


def _rounds(draft: DraftNetwork, batch: TrainingBatch, target: TargetView, depth: int) -> list[int]:
    """Tokens emitted by each round of each answer; a round cut by the end of its answer counts what it emits."""
    size = batch.ids.shape
    match = torch.zeros(depth, *size, dtype=torch.bool, device=batch.ids.device)
    starts = torch.zeros(size, dtype=torch.bool, device=batch.ids.device)
    for step in guided(draft, batch, target, steps=depth):
        rows, active = step.rows, step.active
        guessed = draft.vocab.to_target(draft.logits(step.hidden).argmax(dim=-1))
        right = (guessed == rows.take(batch.ids, ahead=PREDICT + step.step)) & active
        match[step.step, rows.batch, rows.time] = right
        if step.step == 0:
            starts[rows.batch[active], rows.time[active]] = True
    run = match.long().cumprod(dim=0).sum(dim=0)  # [B, T] tokens accepted from each row
    return [length for row in range(size[0]) for length in _walk(run[row].tolist(), starts[row].tolist())]


def _walk(run: list[int], starts: list[bool]) -> list[int]:
    emitted: list[int] = []
    time = 0
    while time < len(run):
        if not starts[time]:
            time += 1
            continue
        left = _span(starts, time)  # tokens of the answer still to come
        count = min(run[time] + 1, left)
        emitted.append(count)
        time += count
    return emitted


def _span(starts: list[bool], time: int) -> int:
    end = time
    while end < len(starts) and starts[end]:
        end += 1
    return end - time
