"""The record of `paceline diagnose`: figures of each draft from counted rounds, with errors over prompts.

Every figure is a function of sums over prompts, so that one bootstrap gives its error (`measure.metrics`).  It knows
neither targets nor files; which sums there are is decided in `measure.diagnose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.decoding.stats import RowStats
from paceline.errors import DataError
from paceline.measure import diagnose
from paceline.measure.diagnose import BINS, ENTROPY_BINS, ENTROPY_STEP, KINDS, PLACES, RANKS, REASONS, Counts, Round
from paceline.measure.metrics import Array, Columns, Estimate, Statistic, divide, estimate, ratio
from paceline.store.figures import rounded

KIND, FORMAT = "diagnose", 1
LISTED = 20  # skipped prompts written out; the rest is counted


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """One prompt decoded with one draft.  tokens: new ones.  stats: counts of its rounds."""

    tokens: Sequence[int]
    stats: RowStats
    rounds: Sequence[Round]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finished run.

    prompts: "file:line" of each.  drafts: name -> (what is known of it, one Diagnosed per prompt).  is_greedy: whether
    drafts must have led to the same tokens.  manifest: plain values.  warnings, skipped: one line each.
    """

    plan: str
    prompts: Sequence[str]
    drafts: Mapping[str, tuple[Mapping[str, Any], Sequence[Diagnosed]]]
    is_greedy: bool
    manifest: Mapping[str, Any]
    warnings: Sequence[str] = ()
    skipped: Sequence[str] = ()
    seed: int = 0


def build_diagnosis(run: Diagnosis) -> dict[str, Any]:
    """The record of one run.  Raises DataError when no prompt had a round."""
    counted = {name: [_counts(each) for each in prompts] for name, (_, prompts) in run.drafts.items()}
    if not any(counts["greedy_rounds"] for prompts in counted.values() for counts in prompts):
        raise DataError("nothing was drafted: every answer ended before a round; ask for more new tokens")
    first = next(iter(counted))
    return {
        "kind": KIND,
        "format": FORMAT,
        "plan": run.plan,
        "n": len(run.prompts),
        "identical": _identical(run),
        "drafts": [
            {"name": name, "about": dict(about), **draft_figures(counted[name], seed=run.seed)}
            for name, (about, _) in run.drafts.items()
        ],
        "differences": [
            {"draft": name, "against": first, **differences(counted[first], counts, seed=run.seed)}
            for name, counts in counted.items()
            if name != first
        ],
        "warnings": list(run.warnings),
        "skipped": list(run.skipped)[:LISTED],
        "num_skipped": len(run.skipped),
        "manifest": dict(run.manifest),
        "requests": {"prompt": list(run.prompts), **{name: _requests(each) for name, each in counted.items()}},
    }


def draft_figures(prompts: Sequence[Counts], *, seed: int = 0) -> dict[str, Any]:
    """Everything that is said of one draft.  prompts: sums of each prompt, as `measure.diagnose.count` names them.

    seed: of the bootstrap.  Each figure NAME has its standard error NAME_se, None with one prompt.
    """
    columns = _columns(prompts)
    total = {name: float(values.sum()) for name, values in columns.items()}
    deepest = max((int(name.removeprefix("offered_")) for name in columns if name.startswith("offered_")), default=0)
    statistics: dict[str, Statistic] = {**MAIN, **_depth_statistics(deepest), **_SHARES, **_ACCEPTED}
    found = estimate(columns, statistics=statistics, seed=seed)
    return {
        "rounds": int(total["rounds"]),
        "drafting_rounds": int(total["greedy_rounds"]),
        "tokens": int(total["tokens"]),
        **_flat(found, MAIN),
        "acceptance_by_depth": [
            {
                "depth": depth,
                "offered": int(total[f"offered_{depth}"]),
                **_named(found, {kind: f"{kind}_{depth}" for kind in ("conditional", "cumulative")}),
            }
            for depth in range(1, deepest + 1)
        ],
        "misses": _misses(total, found),
        "calibration": {kind: _bins(kind, total, found) for kind in KINDS},
        "entropy": _entropy(total),
    }


def differences(first: Sequence[Counts], second: Sequence[Counts], *, seed: int = 0) -> dict[str, Any]:
    """Second minus first of the main figures, paired: the prompts are the same, and resampled together."""
    one, two = _columns(first), _columns(second)
    columns = {**{f"1 {name}": each for name, each in one.items()}, **{f"2 {name}": each for name, each in two.items()}}

    def minus(statistic: Statistic) -> Statistic:
        return lambda sums: statistic(_side(sums, "2 ")) - statistic(_side(sums, "1 "))

    found = estimate(columns, statistics={name: minus(statistic) for name, statistic in MAIN.items()}, seed=seed)
    return _flat(found, MAIN)


def _side(sums: Columns, prefix: str) -> Columns:
    return {name.removeprefix(prefix): values for name, values in sums.items() if name.startswith(prefix)}


def _counts(each: Diagnosed) -> dict[str, float]:
    """Sums over a prompt's rounds and what its statistics say."""
    stats = each.stats
    counts = {**diagnose.count(each.rounds), "rounds": float(stats.rounds), "emitted": float(stats.emitted)}
    counts |= {"accepted": float(stats.accepted), "tokens": float(len(each.tokens)), "drafted": float(stats.drafted)}
    for depth in range(1, max(stats.offered, default=0) + 1):
        counts |= {f"offered_{depth}": stats.offered[depth], f"taken_{depth}": stats.taken[depth]}
    return counts


def _columns(prompts: Sequence[Counts]) -> Columns:
    names = {name: None for counts in prompts for name in counts}
    return {name: np.asarray([counts.get(name, 0.0) for counts in prompts], dtype=np.float64) for name in names}


def _identical(run: Diagnosis) -> bool | None:
    """Whether all drafts led to the same greedy tokens; None for one draft, and when sampling."""
    texts = [[list(each.tokens) for each in prompts] for _, prompts in run.drafts.values()]
    return all(each == texts[0] for each in texts) if run.is_greedy and len(texts) > 1 else None


def _misses(total: Counts, found: Mapping[str, Estimate]) -> dict[str, Any]:
    """Why and at which rank the target's own token was not in the proposal."""
    ranked = sum(total[f"rank_{place}"] for place in range(len(RANKS)))
    ends = [*(first - 1 for first in RANKS[1:]), None]
    return {
        "rounds": int(sum(total[f"miss_{reason}"] for reason in REASONS)),
        "ended_by_draft": int(total["ended"]),
        "reasons": {
            reason: {"count": int(total[f"miss_{reason}"]), **_named(found, {"share": f"share_{reason}"})}
            for reason in REASONS
        },
        "ranks": [
            {
                "first": first,
                "last": last,
                "count": int(total[f"rank_{place}"]),
                "share": rounded(total[f"rank_{place}"] / ranked) if ranked else None,
            }
            for place, (first, last) in enumerate(zip(RANKS, ends, strict=True))
        ],
    }


def _bins(kind: str, total: Counts, found: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """Confidence against acceptance, bin by bin; empty bins keep their place."""
    rows: list[dict[str, Any]] = []
    for place in range(BINS):
        name = f"{kind}_{place}"
        number = total[f"{name}_n"]
        rows.append(
            {
                "low": place / BINS,
                "high": (place + 1) / BINS,
                "count": int(number),
                "confidence": rounded(total[f"{name}_q"] / number) if number else None,
                **_named(found, {"accepted": f"accepted_{name}"}),
            }
        )
    return rows


def _entropy(total: Counts) -> dict[str, Any]:
    """How many laws each mean is over, and histograms; the means are among the main figures."""
    return {
        "unit": "nats",
        "counts": {place: int(total[f"nats_{place}_n"]) for place in PLACES},
        "step": ENTROPY_STEP,
        "histogram": {
            side: [int(total[f"nats_{side}_{place}"]) for place in range(ENTROPY_BINS)]
            for side in ("accepted", "rejected")
        },
    }


def _requests(prompts: Sequence[Counts]) -> dict[str, list[Any]]:
    """Columns, one entry per prompt, from which the main shares can be computed again."""
    kept = ("rounds", "emitted", "greedy_rounds", "greedy_pruned", "accepting", "coinciding", "whole")
    return {name: [int(counts[name]) for counts in prompts] for name in kept}


def _flat(found: Mapping[str, Estimate], names: Mapping[str, Any]) -> dict[str, Any]:
    return _named(found, {name: name for name in names})


def _named(found: Mapping[str, Estimate], names: Mapping[str, str]) -> dict[str, Any]:
    """NAME and NAME_se for each figure.  names: NAME -> the figure's name."""
    flat: dict[str, Any] = {}
    for name, key in names.items():
        flat[name], flat[f"{name}_se"] = rounded(found[key].value), rounded(found[key].error)
    return flat


def _depth_statistics(deepest: int) -> dict[str, Statistic]:
    depths = range(1, deepest + 1)
    conditional = {f"conditional_{depth}": ratio(f"taken_{depth}", f"offered_{depth}") for depth in depths}
    return conditional | {f"cumulative_{depth}": ratio(f"taken_{depth}", "rounds") for depth in depths}


def _calibration_error(kind: str) -> Statistic:
    """Expected calibration error: sum over bins of n_b / n times abs(accepted share - mean confidence)."""

    def statistic(sums: Columns) -> Array:
        gaps = [abs(sums[f"{kind}_{place}_accepted"] - sums[f"{kind}_{place}_q"]) for place in range(BINS)]
        return divide(sum(gaps, np.zeros_like(gaps[0])), _over_bins(sums, kind, "n"))

    return statistic


def _excess(kind: str) -> Statistic:
    """Mean confidence minus accepted share: above 0 the draft believes too much."""

    def statistic(sums: Columns) -> Array:
        gap = _over_bins(sums, kind, "q") - _over_bins(sums, kind, "accepted")
        return divide(gap, _over_bins(sums, kind, "n"))

    return statistic


def _over_bins(sums: Columns, kind: str, what: str) -> Array:
    return np.sum([sums[f"{kind}_{place}_{what}"] for place in range(BINS)], axis=0)


def _all_rounds_coinciding(sums: Columns) -> Array:
    empty = sums["greedy_rounds"] - sums["accepting"]
    return divide(sums["coinciding"] + empty, sums["greedy_rounds"])


def _mean_nats(*places: str) -> Statistic:
    def statistic(sums: Columns) -> Array:
        nats = np.sum([sums[f"nats_{place}_sum"] for place in places], axis=0)
        return divide(nats, np.sum([sums[f"nats_{place}_n"] for place in places], axis=0))

    return statistic


def _share_of_misses(reason: str) -> Statistic:
    return lambda sums: divide(sums[f"miss_{reason}"], np.sum([sums[f"miss_{each}"] for each in REASONS], axis=0))


MAIN: Mapping[str, Statistic] = {
    "accepted_length": ratio("emitted", "rounds"),
    "nodes_per_round": ratio("drafted", "rounds"),
    "pruned_share": ratio("greedy_pruned", "greedy_rounds"),
    "greedy_kept_share": ratio("greedy_kept", "greedy_rounds"),
    "greedy_coincidence": ratio("coinciding", "accepting"),
    "greedy_coincidence_all": _all_rounds_coinciding,
    "greedy_coincidence_strict": ratio("coinciding", "greedy_rounds"),
    "greedy_whole": ratio("whole", "greedy_rounds"),
    "accepting_share": ratio("accepting", "greedy_rounds"),
    "token_calibration_error": _calibration_error("token"),
    "token_excess": _excess("token"),
    "path_calibration_error": _calibration_error("path"),
    "path_excess": _excess("path"),
    "entropy_accepted": _mean_nats("accepted"),
    "entropy_rejected": _mean_nats("missed", "behind"),
    "entropy_missed": _mean_nats("missed"),
    "entropy_behind": _mean_nats("behind"),
}
_SHARES: Mapping[str, Statistic] = {f"share_{reason}": _share_of_misses(reason) for reason in REASONS}
_ACCEPTED: Mapping[str, Statistic] = {
    f"accepted_{kind}_{place}": ratio(f"{kind}_{place}_accepted", f"{kind}_{place}_n")
    for kind in KINDS
    for place in range(BINS)
}
