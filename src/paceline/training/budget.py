"""What a run's training has cost, read from its log, and how many steps another may take for the same seconds.

Seconds are those of the optimiser steps alone: validation and saving are the instrument's, and pauses between a kill
and a resume nobody's.  It knows no file and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP = 2  # first steps of a trial, which pay for what is made once
Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Spent:
    """A run's costs and its scores.

    tokens: trained on, prompts included.  supervised: those that were predicted.  seconds: of all optimiser steps.
    accepted_length, error: simulated, at the end.  best, best_step: the highest, and where.
    """

    steps: int
    tokens: int
    supervised: int
    seconds: float
    accepted_length: float | None
    error: float | None
    best: float | None
    best_step: int | None


def spent(events: Events) -> Spent:
    """What a log (see `training.log.read_log`) says of its run."""
    trained = [event for event in events if event["event"] == "train"]
    scores = [event for event in events if event["event"] == "validation"]
    top = max(scores, key=lambda event: (event["accepted_length"], -event["step"]), default=None)
    return Spent(
        steps=trained[-1]["step"] if trained else 0,
        tokens=sum(event["tokens"] for event in trained),
        supervised=trained[-1]["supervised_tokens"] if trained else 0,
        seconds=sum(map(_seconds, trained)),
        accepted_length=scores[-1]["accepted_length"] if scores else None,
        error=scores[-1]["standard_error"] if scores else None,
        best=None if top is None else top["accepted_length"],
        best_step=None if top is None else top["step"],
    )


def step_seconds(events: Events, *, skip: int = WARM_UP) -> float:
    """Mean seconds of an optimiser step.  skip: first steps that do not count; the log must say them apart."""
    trained = [event for event in events if event["event"] == "train"]
    counted = [event for event in trained if event["step"] > skip]
    steps = counted[-1]["step"] - max((event["step"] for event in trained if event["step"] <= skip), default=0)
    return sum(map(_seconds, counted)) / steps


def equal_steps(steps: int, *, baseline: float, own: float) -> int:
    """Steps of `own` seconds each that take as long as `steps` of the baseline; at least 1.  Both are seconds."""
    return max(1, round(steps * baseline / own))


def seconds_left(costs: Mapping[str, Sequence[float]], waiting: Sequence[str]) -> float | None:
    """Seconds of the cells that wait, by what finished ones have cost; None before the first one.

    costs: arm -> seconds of its finished cells.  waiting: arm of each cell to come; one that has none takes the mean.
    """
    known = [seconds for each in costs.values() for seconds in each]
    if not known:
        return None
    mean = sum(known) / len(known)
    return sum(sum(costs[arm]) / len(costs[arm]) if costs.get(arm) else mean for arm in waiting)


def _seconds(event: Mapping[str, Any]) -> float:
    return event["tokens"] / event["tokens_per_s"] if event["tokens_per_s"] else 0.0
