"""A study's results: what each cell's training cost, what every arm reached, and what it gained over the baseline.

It turns cells and observations into one record of plain values, and into the record of a single comparison.  It trains
nothing, and how records are shown is for `measure.study_tables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.measure.ledger import Observation
from paceline.measure.paired import Sample, Spread, draft_figures, gain_figures, mean_over_seeds
from paceline.measure.record import Measurement, build_record
from paceline.measure.systems import PLAIN, System
from paceline.store.figures import rounded

KIND, PAIR, FORMAT = "study", "pair", 1
COSTS = ("steps", "tokens", "supervised", "seconds", "accepted_length", "best")  # that a training reports


@dataclass(frozen=True, slots=True)
class CellResult:
    """A trained draft: its arm and seed, what its training cost, and what identifies it.

    costs: names of COSTS -> figures; {} for a draft that was not trained here.  about: as a bench record says it.
    """

    arm: str
    seed: int
    equal: str
    costs: Mapping[str, float | None]
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One interleaved run: all arms of a seed with all plans at one temperature.

    conditions: what a bench record's manifest adds.  observations: with results under `system_name(arm, plan)`.
    """

    seed: int
    temperature: float
    conditions: Mapping[str, Any]
    observations: Sequence[Observation]
    skipped: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StudyResult:
    """Everything that a study has measured.  arms: in order.  plans: as spelled.  about: what its file says."""

    name: str
    baseline: str
    arms: Sequence[str]
    plans: Sequence[str]
    cells: Sequence[CellResult]
    runs: Sequence[SeedRun]
    about: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def temperatures(self) -> list[float]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(run.temperature for run in self.runs))


def system_name(arm: str, plan: str) -> str:
    """The key of an arm with a plan among a run's decoders."""
    return f"{arm} {plan}"


def study_record(result: StudyResult) -> dict[str, Any]:
    """The record of a whole study: costs by arm, then figures and gains by temperature, plan and arm."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "name": result.name,
        "baseline": result.baseline,
        "seeds": sorted({run.seed for run in result.runs}),
        "study": dict(result.about),
        "arms": {arm: _costs(result, arm) for arm in result.arms},
        "measured": [
            _measured(result, arm, plan=plan, temperature=temperature)
            for temperature in result.temperatures
            for plan in result.plans
            for arm in result.arms
        ],
        "cells": [
            {**rounded(asdict(cell)), "about": {key: cell.about.get(key) for key in ("name", "kind", "fingerprint")}}
            for cell in result.cells
        ],
        "num_skipped": max((len(run.skipped) for run in result.runs), default=0),
        "manifest": dict(result.manifest),
    }


def pair_record(result: StudyResult, *, arm: str, plan: str, temperature: float) -> dict[str, Any]:
    """The record of one comparison: bench records of both arms, pooled over files and seeds, and the gains.

    They stand under `baseline` and under the arm's own name; the per-request columns are in the study's folder.
    """
    compared = _measured(result, arm, plan=plan, temperature=temperature)
    own = {key: value for key, value in compared.items() if key not in ("arm", "plan", "temperature")}
    return {
        "kind": PAIR,
        "format": FORMAT,
        "name": result.name,
        "arms": {"baseline": result.baseline, "compared": arm},
        "plan": plan,
        "temperature": temperature,
        **_gains(own),
        "num_prompts": own["num_prompts"],
        "seeds": own["seeds"],
        "identical": own["identical"],
        "per_file": {file: {"n": figures["n"], **_gains(figures)} for file, figures in own["per_file"].items()},
        "costs": {name: _costs(result, name) for name in (result.baseline, arm)},
        "baseline": _bench_record(result, result.baseline, plan=plan, temperature=temperature),
        arm: _bench_record(result, arm, plan=plan, temperature=temperature),
        "study": dict(result.about),
        "manifest": dict(result.manifest),
    }


def _gains(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The gains alone, their errors under the shorter names too that a comparison is asked for by."""
    kept = {name: value for name, value in figures.items() if "gain" in name}
    return kept | {f"{name}_se": figures[f"{name}_pct_se"] for name in ("length_gain", "s_wall_gain")}


def any_differs(result: StudyResult) -> bool:
    """Whether a greedy output was not the plain one, which in float32 must never happen."""
    return any(each.mismatches for run in result.runs for each in run.observations)


def _costs(result: StudyResult, arm: str) -> dict[str, Any]:
    """Mean and standard error over seeds of what the arm's trainings cost."""
    cells = [cell for cell in result.cells if cell.arm == arm]
    costs: dict[str, Any] = {"equal": cells[0].equal if cells else None, "num_seeds": len(cells)}
    for name in COSTS:
        spread = mean_over_seeds({cell.seed: cell.costs.get(name) for cell in cells})
        costs |= {name: spread.value, f"{name}_se": spread.error}
    return rounded(costs)


def _measured(result: StudyResult, arm: str, *, plan: str, temperature: float) -> dict[str, Any]:
    own = _samples(result, arm, plan=plan, temperature=temperature)
    base = _samples(result, result.baseline, plan=plan, temperature=temperature)
    files = list(dict.fromkeys(each.file for each in own))
    return {
        "arm": arm,
        "plan": plan,
        "temperature": temperature,
        "num_prompts": len({each.prompt for each in own}),
        "seeds": sorted({each.seed for each in own}),
        "identical": _identical(result, system_name(arm, plan), temperature=temperature),
        **_figures(own, base, is_baseline=arm == result.baseline),
        "per_file": {
            file: {
                "n": sum(each.file == file for each in own),
                **_short(
                    _figures(
                        [each for each in own if each.file == file],
                        [each for each in base if each.file == file],
                        is_baseline=arm == result.baseline,
                    )
                ),
            }
            for file in files
        },
    }


def _figures(own: Sequence[Sample], base: Sequence[Sample], *, is_baseline: bool) -> dict[str, Any]:
    figures: dict[str, Spread] = draft_figures(own)
    if not is_baseline:
        figures |= gain_figures(base, own)
    flat: dict[str, Any] = {}
    for name, spread in figures.items():
        flat |= rounded(spread.as_dict(name))
    return flat


def _short(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Values and errors alone: with the parts of the errors, single files would make the record too large."""
    parts = ("_se_prompts", "_se_seeds", "_by_seed")
    return {name: value for name, value in figures.items() if not name.endswith(parts)}


def _samples(result: StudyResult, arm: str, *, plan: str, temperature: float) -> list[Sample]:
    name = system_name(arm, plan)
    return [
        Sample(each.conversation, each.turn, run.seed, each.file, each.results[PLAIN], each.results[name])
        for run in result.runs
        if run.temperature == temperature
        for each in run.observations
    ]


def _identical(result: StudyResult, name: str, *, temperature: float) -> bool | None:
    if temperature > 0:
        return None
    runs = [run for run in result.runs if run.temperature == temperature]
    return not any(name in each.mismatches for run in runs for each in run.observations)


def _bench_record(result: StudyResult, arm: str, *, plan: str, temperature: float) -> dict[str, Any]:
    """As `paceline bench` would have written it, with the observations of all seeds."""
    name = system_name(arm, plan)
    runs = [run for run in result.runs if run.temperature == temperature]
    pooled: list[Observation] = []
    for run in runs:
        for each in run.observations:
            results = {PLAIN: each.results[PLAIN], plan: each.results[name]}
            mismatches = {plan: each.mismatches[name]} if name in each.mismatches else {}
            pooled.append(replace(each, results=results, mismatches=mismatches))
    abouts = [dict(cell.about) for cell in result.cells if cell.arm == arm]
    manifest = {**result.manifest, **(runs[0].conditions if runs else {}), "plan": plan}
    manifest |= {"draft": abouts[0] if abouts else None, "fingerprints": [each.get("fingerprint") for each in abouts]}
    system = System(plan, f"{arm}, {plan}", _never)
    skipped = list(dict.fromkeys(line for run in runs for line in run.skipped))
    record = build_record(Measurement(pooled, system, [], [], temperature == 0, manifest, skipped=skipped))
    return {**record, "requests": None}


def _never(_ids: list[int], _seed: int) -> tuple[list[int], None]:
    """What a system that has been measured already decodes with."""
    raise AssertionError("it was measured already")
