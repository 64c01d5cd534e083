"""The metrics of docs/glossary.md from counted rounds and measured seconds, each with a standard error over prompts.

Every metric is a ratio of sums over prompts, so one table of columns gives the figure and, resampled, its error.  It
knows no target, no file and no clock: what was counted is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.decoding.stats import RunStats

RESAMPLES = 2000  # bootstrap draws; the error of an error is then about 1.6 %
Array = NDArray[np.float64]
Columns = Mapping[str, Array]
Statistic = Callable[[Columns], Array]


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt decoded once.

    tokens: new tokens.  wall: seconds of the whole call; prefill, draft, target, verify: seconds of its phases (draft
    includes the draft's own reading of the prompt).  rounds, accepted, emitted, drafted: counts after prefill, as in
    `decoding.stats.RowStats`.  offered, taken: the same by depth, index 0 = depth 1.
    """

    tokens: int
    wall: float
    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    rounds: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted: int = 0
    offered: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """The inverse of `dataclasses.asdict`, after a way through JSON."""
        plain = {name: value for name, value in values.items() if name not in ("offered", "taken")}
        return cls(**plain, offered=tuple(values["offered"]), taken=tuple(values["taken"]))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over prompts.

    value: None where nothing was counted.  error: standard error by bootstrap over prompts, None with one prompt.
    low, high: ends of the 95 % interval (percentiles), None with one prompt.
    """

    value: float | None
    error: float | None = None
    low: float | None = None
    high: float | None = None


def measured(stats: RunStats | None, *, tokens: int, wall: float) -> Measured:
    """What a call was, from its statistics (None: the decoder keeps none).  tokens: new ones.  wall: seconds."""
    if stats is None:
        return Measured(tokens, wall)
    total = stats.total
    deepest = max(total.offered, default=0)
    return Measured(
        tokens=tokens, wall=wall, prefill=stats.prefill_seconds, draft=stats.draft_seconds,
        target=stats.target_seconds, verify=stats.verify_seconds, rounds=total.rounds, accepted=total.accepted,
        emitted=total.emitted, drafted=total.drafted,
        offered=tuple(total.offered[depth] for depth in range(1, deepest + 1)),
        taken=tuple(total.taken[depth] for depth in range(1, deepest + 1)),
    )  # fmt: skip


def speculative_figures(
    plain: Sequence[Measured], draft: Sequence[Measured], *, groups: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """All figures of the same prompts decoded plainly and with a draft.

    groups: per prompt the conversation it belongs to, which is resampled as one (None = each its own).
    Depth d has `cumulative_d`, the share of rounds that accepted at least d tokens, and `conditional_d`, the share of
    kept children among the rounds that reached depth d - 1 and had one offered there.
    """
    columns = {**_columns(plain, "plain"), **_columns(draft, "draft")}
    deepest = max((len(each.offered) for each in draft), default=0)
    statistics = dict(SPEED) | dict(ACCEPTANCE)
    for depth in range(1, deepest + 1):
        statistics[f"cumulative_{depth}"] = ratio(f"draft_taken_{depth}", "draft_rounds")
        statistics[f"conditional_{depth}"] = ratio(f"draft_taken_{depth}", f"draft_offered_{depth}")
    return estimate(columns, statistics=statistics, groups=groups, seed=seed)


def acceptance_figures(
    draft: Sequence[Measured], *, groups: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """Accepted length and its kin, which need no plain run.  Arguments as in `speculative_figures`."""
    return estimate(_columns(draft, "draft"), statistics=ACCEPTANCE, groups=groups, seed=seed)


def speed_figures(
    plain: Sequence[Measured], other: Sequence[Measured], *, groups: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """`s_wall` and tokens per second of any other decoder of the same prompts."""
    columns = {**_columns(plain, "plain"), **_columns(other, "draft")}
    kept = {name: SPEED[name] for name in ("s_wall", "tokens_per_s_plain", "tokens_per_s_draft")}
    return estimate(columns, statistics=kept, groups=groups, seed=seed)


def plain_figures(
    plain: Sequence[Measured], *, groups: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """What can be said without a draft: tokens per second and the time of a target call."""
    kept = {name: SPEED[name] for name in ("tokens_per_s_plain", "t_plain")}
    return estimate(_columns(plain, "plain"), statistics=kept, groups=groups, seed=seed)


def time_shares(calls: Sequence[Measured]) -> dict[str, float]:
    """Shares of wall time by phase; `other` is what no phase claims (options, text, bookkeeping).  {} without time."""
    wall = sum(call.wall for call in calls)
    if wall <= 0:
        return {}
    phases = {
        "prefill": sum(call.prefill for call in calls),
        "draft": sum(call.draft for call in calls),
        "target": sum(call.target for call in calls),
        "verify": sum(call.verify for call in calls),
    }
    phases["other"] = wall - sum(phases.values())
    return {name: seconds / wall for name, seconds in phases.items()}


def estimate(
    columns: Columns, *, statistics: Mapping[str, Statistic], groups: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """Each statistic of the column sums, with its bootstrap error.

    columns: name -> [n] values, one per prompt.  statistics: functions of the sums that work elementwise.
    groups, seed: as in `speculative_figures`.
    """
    count = len(next(iter(columns.values())))
    names, where = np.unique(np.arange(count) if groups is None else np.asarray(groups), return_inverse=True)
    by_group = {name: np.bincount(where, weights=values, minlength=len(names)) for name, values in columns.items()}
    sums = {name: values.sum(keepdims=True) for name, values in by_group.items()}
    number = len(names)
    if number < 2:
        return {name: Estimate(_finite(statistic(sums)[0])) for name, statistic in statistics.items()}
    weights = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), size=RESAMPLES)
    drawn = {name: weights.astype(np.float64) @ values for name, values in by_group.items()}
    return {name: _estimate(statistic(sums)[0], statistic(drawn)) for name, statistic in statistics.items()}


def _estimate(value: np.float64, draws: Array) -> Estimate:
    kept = draws[np.isfinite(draws)]
    if _finite(value) is None or len(kept) < 2:
        return Estimate(_finite(value))
    low, high = np.quantile(kept, [0.025, 0.975])
    return Estimate(float(value), float(kept.std(ddof=1)), float(low), float(high))


def _finite(value: np.float64) -> float | None:
    return float(value) if np.isfinite(value) else None


def _columns(calls: Sequence[Measured], prefix: str) -> dict[str, Array]:
    """One column per count, [n] each; `mean` is a request's own accepted length and `counted` whether it has one."""
    values: dict[str, list[float]] = {
        "tokens": [call.tokens for call in calls],
        "wall": [call.wall for call in calls],
        "later_tokens": [max(call.tokens - 1, 0) for call in calls],  # the first one comes from prefill
        "later_wall": [call.wall - call.prefill for call in calls],
        "draft": [call.draft for call in calls],
        "target": [call.target for call in calls],
        "rounds": [call.rounds for call in calls],
        "accepted": [call.accepted for call in calls],
        "emitted": [call.emitted for call in calls],
        "drafted": [call.drafted for call in calls],
        "mean": [call.emitted / call.rounds if call.rounds else 0.0 for call in calls],
        "counted": [float(call.rounds > 0) for call in calls],
    }
    for depth in range(1, max((len(call.offered) for call in calls), default=0) + 1):
        values[f"offered_{depth}"] = [_at(call.offered, depth) for call in calls]
        values[f"taken_{depth}"] = [_at(call.taken, depth) for call in calls]
    return {f"{prefix}_{name}": np.asarray(column, dtype=np.float64) for name, column in values.items()}


def _at(counts: tuple[int, ...], depth: int) -> int:
    return counts[depth - 1] if depth <= len(counts) else 0


def divide(above: Array, below: Array) -> Array:
    """Elementwise quotient, NaN where nothing was counted below."""
    return np.divide(above, below, out=np.full_like(above, np.nan, dtype=np.float64), where=below > 0)


def ratio(above: str, below: str) -> Statistic:
    """The quotient of two columns' sums."""
    return lambda sums: divide(sums[above], sums[below])


def _speed_ratio(seconds: str, tokens: str) -> Statistic:
    """Plain seconds per token over the draft's: with identical outputs, the ratio of the seconds."""

    def statistic(sums: Columns) -> Array:
        plain = divide(sums[f"plain_{seconds}"], sums[f"plain_{tokens}"])
        return divide(plain, divide(sums[f"draft_{seconds}"], sums[f"draft_{tokens}"]))

    return statistic


def _s_model(sums: Columns) -> Array:
    """L * t_plain / (t_verify + t_draft), which is emitted * t_plain / (seconds in the target and in the draft)."""
    t_plain = divide(sums["plain_target"], sums["plain_rounds"])
    return divide(sums["draft_emitted"] * t_plain, sums["draft_target"] + sums["draft_draft"])


ACCEPTANCE: Mapping[str, Statistic] = {
    "accepted_length": ratio("draft_emitted", "draft_rounds"),
    "accepted_drafted": ratio("draft_accepted", "draft_rounds"),
    "accepted_length_by_request": ratio("draft_mean", "draft_counted"),
    "drafted_share": ratio("draft_accepted", "draft_emitted"),
    "nodes_per_round": ratio("draft_drafted", "draft_rounds"),
}
SPEED: Mapping[str, Statistic] = {
    "s_wall": _speed_ratio("wall", "tokens"),
    "s_decode": _speed_ratio("later_wall", "later_tokens"),
    "s_model": _s_model,
    "tokens_per_s_plain": ratio("plain_tokens", "plain_wall"),
    "tokens_per_s_draft": ratio("draft_tokens", "draft_wall"),
    "t_plain": ratio("plain_target", "plain_rounds"),
    "t_verify": ratio("draft_target", "draft_rounds"),
    "t_draft": ratio("draft_draft", "draft_rounds"),
}
