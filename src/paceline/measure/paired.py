"""Several drafts on the same prompts and seeds: each one's figures, and what one gains over another, pair by pair.

Every figure is a ratio of sums over prompts and seeds.  Its error has two parts: over prompts (bootstrap; a prompt is
drawn with all its seeds, and in a difference with both drafts) and over seeds (standard deviation of the seeds' own
figures, divided by the root of their number).  The error is the root of the sum of their squares, which counts what
prompt and seed do together twice: a little too large rather than too small.  It knows no file and no training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.measure.metrics import Columns, Measured, Statistic, estimate

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request decoded with one draft.

    prompt: number of its conversation, the same for all seeds.  turn: within it.  seed: that the draft was trained
    with.  plain: the target alone, in the same run.  call: with the draft.
    """

    prompt: int
    turn: int
    seed: int
    file: str
    plain: Measured
    call: Measured

    @property
    def key(self) -> tuple[int, int, int]:
        """What two drafts must share to be a pair."""
        return self.seed, self.prompt, self.turn


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure with its errors; None where there is nothing to count, or a single prompt or seed.

    over_prompts, over_seeds: the parts of `error`.  by_seed: the figure of each seed alone.
    """

    value: float | None
    error: float | None = None
    over_prompts: float | None = None
    over_seeds: float | None = None
    by_seed: Mapping[int, float | None] = field(default_factory=dict[int, float | None])

    def as_dict(self, name: str) -> dict[str, Any]:
        """Plain values: `name`, `name_se`, its two parts, and the seeds' own figures."""
        return {
            name: self.value,
            f"{name}_se": self.error,
            f"{name}_se_prompts": self.over_prompts,
            f"{name}_se_seeds": self.over_seeds,
            f"{name}_by_seed": {str(seed): value for seed, value in self.by_seed.items()},
        }


def draft_figures(samples: Sequence[Sample], *, seed: int = 0) -> dict[str, Spread]:
    """`accepted_length`, `s_wall` and `tokens_per_s` of one draft.  seed: of the bootstrap."""
    return _spreads(_columns(samples, "arm") | _columns(samples, "plain", of_plain=True), samples, OWN, seed)


def gain_figures(base: Sequence[Sample], arm: Sequence[Sample], *, seed: int = 0) -> dict[str, Spread]:
    """`length_gain_pct` and `s_wall_gain_pct`: how many per cent `arm` is above `base`, on the same prompts and seeds.

    s_wall's gain is the ratio of the drafts' seconds per token: the plain run is the same for both and cancels.
    Raises DataError when the two were not measured on the same requests.
    """
    ordered = sorted(base, key=lambda each: each.key), sorted(arm, key=lambda each: each.key)
    if [each.key for each in ordered[0]] != [each.key for each in ordered[1]]:
        raise DataError("the two drafts were measured on other prompts or seeds; a difference needs the same ones")
    return _spreads(_columns(ordered[0], "base") | _columns(ordered[1], "arm"), ordered[1], GAINS, seed)


def mean_over_seeds(values: Mapping[int, float | None]) -> Spread:
    """Mean of one number per seed, with its standard error over seeds; seeds without a number are left out."""
    found = [value for value in values.values() if value is not None]
    if not found:
        return Spread(None, by_seed=dict(values))
    error = _over_seeds(found)
    return Spread(statistics.fmean(found), error, None, error, dict(values))


def _spreads(
    columns: Columns, samples: Sequence[Sample], wanted: Mapping[str, Statistic], seed: int
) -> dict[str, Spread]:
    if not samples:
        return dict.fromkeys(wanted, Spread(None))
    seeds = np.array([each.seed for each in samples])
    groups = [each.prompt for each in samples]
    pooled = estimate(columns, statistics=wanted, groups=groups, seed=seed)
    alone: dict[int, dict[str, float | None]] = {}
    for one in sorted(set(seeds.tolist())):
        sums = {name: values[seeds == one].sum(keepdims=True) for name, values in columns.items()}
        alone[one] = {name: _finite(statistic(sums)[0]) for name, statistic in wanted.items()}
    return {name: _spread(pooled[name].value, pooled[name].error, name, alone) for name in wanted}


def _spread(
    value: float | None, over_prompts: float | None, name: str, alone: Mapping[int, Mapping[str, float | None]]
) -> Spread:
    by_seed = {seed: figures[name] for seed, figures in alone.items()}
    over_seeds = _over_seeds([figure for figure in by_seed.values() if figure is not None])
    parts = [part for part in (over_prompts, over_seeds) if part is not None]
    return Spread(value, math.hypot(*parts) if parts else None, over_prompts, over_seeds, by_seed)


def _over_seeds(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _columns(samples: Sequence[Sample], prefix: str, *, of_plain: bool = False) -> dict[str, Array]:
    calls = [each.plain if of_plain else each.call for each in samples]
    columns = {
        "emitted": [call.emitted for call in calls],
        "rounds": [call.rounds for call in calls],
        "tokens": [call.tokens for call in calls],
        "wall": [call.wall for call in calls],
    }
    return {f"{prefix}_{name}": np.asarray(values, dtype=np.float64) for name, values in columns.items()}


def _finite(value: np.float64) -> float | None:
    return float(value) if np.isfinite(value) else None


def _divide(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.full_like(above, np.nan, dtype=np.float64), where=below > 0)


def _length(sums: Columns, who: str) -> Array:
    return _divide(sums[f"{who}_emitted"], sums[f"{who}_rounds"])


def _rate(sums: Columns, who: str) -> Array:
    return _divide(sums[f"{who}_tokens"], sums[f"{who}_wall"])


OWN: Mapping[str, Statistic] = {
    "accepted_length": lambda sums: _length(sums, "arm"),
    "s_wall": lambda sums: _divide(_rate(sums, "arm"), _rate(sums, "plain")),
    "tokens_per_s": lambda sums: _rate(sums, "arm"),
}
GAINS: Mapping[str, Statistic] = {
    "length_gain_pct": lambda sums: 100 * (_divide(_length(sums, "arm"), _length(sums, "base")) - 1),
    "s_wall_gain_pct": lambda sums: 100 * (_divide(_rate(sums, "arm"), _rate(sums, "base")) - 1),
}
