"""A benchmark's record: figures with errors, what was equal, who measured, as one JSON object under 200 kB.

It turns observations into plain values and knows how they are written; how they are shown is for `measure.report`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.measure import metrics
from paceline.measure.ledger import Observation
from paceline.measure.metrics import Estimate, Measured
from paceline.measure.systems import PLAIN, System
from paceline.store.figures import rounded
from paceline.store.files import write_text

KIND, FORMAT = "bench", 1
MAX_BYTES = 200_000
LISTED = 20  # mismatches written out; the rest is counted
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)  # edges of prompt length, tokens (K13)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A finished run.

    observations: all of them, in order.  draft: the decoder that the record is about, None for a plain run.
    others: further plans of the same run.  is_greedy: whether outputs were compared.  manifest: plain values.
    warnings: one line each.  skipped: prompts that were not decoded, one line each.
    """

    observations: Sequence[Observation]
    draft: System | None
    others: Sequence[System]
    baselines: Sequence[System]
    is_greedy: bool
    manifest: Mapping[str, Any]
    warnings: Sequence[str] = ()
    skipped: Sequence[str] = ()
    seed: int = 0


def build_record(run: Measurement) -> dict[str, Any]:
    """The record of one run.  Raises DataError when nothing was measured."""
    if not run.observations:
        raise DataError("nothing was measured: the workload gave no prompt")
    name = run.draft.name if run.draft is not None else None
    figures = _figures(run.observations, name, run.seed)
    identical = _identical(run, name)
    return {
        "kind": KIND,
        "format": FORMAT,
        "plan": name,
        "n": len(run.observations),
        "conversations": len({each.conversation for each in run.observations}),
        "verdict": verdict(figures, identical=identical, name=name, mismatches=_differing(run.observations, name)),
        "identical": identical,
        "mismatches": _mismatches(run.observations, name),
        "rounds": _count(run.observations, name, lambda call: call.rounds),
        "tokens": _count(run.observations, name, lambda call: call.tokens),
        **_flat(figures),
        "acceptance_by_depth": _by_depth(figures, run.observations, name),
        "acceptance_by_prompt_length": _groups(run, name, _bucket),
        "per_file": _groups(run, name, lambda each: each.file),
        "time_shares": {
            label: rounded(metrics.time_shares([each.results[system] for each in run.observations]))
            for label, system in (("plain", PLAIN), ("draft", name))
            if system is not None
        },
        "other_plans": [_other(run, system) for system in run.others],
        "baselines": {system.name: _baseline(run, system) for system in run.baselines},
        "warnings": list(run.warnings),
        "skipped": list(run.skipped)[:LISTED],
        "num_skipped": len(run.skipped),
        "manifest": dict(run.manifest),
        "requests": _requests(run.observations, name),
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all; one that would pass 200 kB leaves its per-request columns out and says so.

    Raises DataError when it is too large even so.
    """
    text = to_json(record)
    if len(text.encode()) >= MAX_BYTES and record.get("requests") is not None:
        note = f"the columns of single requests are left out: with them the record has {len(text.encode())} bytes"
        text = to_json({**record, "requests": None, "warnings": [*record["warnings"], note]})
    if len(text.encode()) >= MAX_BYTES:
        raise DataError(f"{path.name} would have {len(text.encode())} bytes, at most {MAX_BYTES}; measure fewer files")
    write_text(path, text)


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Every *.json of a folder by the name of its file, without the suffix.  Raises DataError naming a broken one."""
    records: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}; measure it again") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}: found {type(value).__name__}, expected a record, which is an object")
        records[path.stem] = value
    return records


@contextmanager
def usable(name: str) -> Generator[None, None, None]:
    """Whatever a record lacks, or holds in another form than expected, becomes a DataError that names the record."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"the record {name} cannot be used: {what}; expected one that paceline wrote: measure it again"
        ) from error


def to_json(record: Mapping[str, Any]) -> str:
    """Indented JSON in which a list of plain values takes one line."""
    return _json(record, indent="") + "\n"


def verdict(figures: Mapping[str, Estimate], *, identical: bool | None, name: str | None, mismatches: int) -> str:
    """Whether speculation paid, in one plain sentence (K38)."""
    if name is None:
        return "No draft: plain decoding only."
    speed = figures["s_wall"]
    if speed.value is None:
        text = "Nothing was decoded, so there is no speed to compare."
    elif speed.low is None or speed.high is None:
        paid = "ran faster" if speed.value >= 1 else "did not pay"
        text = f"Speculation {paid}: {speed.value:.2f}x plain decoding, on one conversation, so without an error."
    else:
        interval = f"{speed.value:.2f}x plain decoding (95 % interval {speed.low:.2f} to {speed.high:.2f})"
        if speed.high < 1:
            text = f"Speculation does not pay: {interval}; decode without this draft."
        elif speed.low <= 1:
            text = f"Speculation is not shown to pay: {interval}, which includes 1."
        else:
            text = f"Speculation pays: {interval}."
    if identical is False:
        text += f" OUTPUTS DIFFER on {mismatches} prompts: see mismatches."
    return text


def _figures(observations: Sequence[Observation], name: str | None, seed: int) -> dict[str, Estimate]:
    groups = [each.conversation for each in observations]
    plain = [each.results[PLAIN] for each in observations]
    if name is not None:
        draft = [each.results[name] for each in observations]
        return metrics.speculative_figures(plain, draft, groups=groups, seed=seed)
    nothing = dict.fromkeys((*metrics.ACCEPTANCE, *metrics.SPEED), Estimate(None))
    return nothing | metrics.plain_figures(plain, groups=groups, seed=seed)


def _identical(run: Measurement, name: str | None) -> bool | None:
    """None when sampling: the law is equal, which is proved by enumeration, and single outputs are not comparable."""
    return _differing(run.observations, name) == 0 if run.is_greedy and name is not None else None


def _differing(observations: Sequence[Observation], name: str | None) -> int:
    return sum(name in each.mismatches for each in observations)


def _mismatches(observations: Sequence[Observation], name: str | None) -> list[dict[str, Any]]:
    found = [(each, each.mismatches[name]) for each in observations if name is not None and name in each.mismatches]
    return [{"prompt": f"{each.file}:{each.line}", "turn": each.turn, **asdict(one)} for each, one in found[:LISTED]]


def _count(observations: Sequence[Observation], name: str | None, pick: Callable[[Measured], int]) -> int:
    return sum(pick(each.results[name or PLAIN]) for each in observations)


def _by_depth(figures: Mapping[str, Estimate], observations: Sequence[Observation], name: str | None) -> list[Any]:
    rows: list[dict[str, Any]] = []
    while f"cumulative_{len(rows) + 1}" in figures and name is not None:
        depth = len(rows) + 1
        picked = {kind: figures[f"{kind}_{depth}"] for kind in ("conditional", "cumulative")}
        offered = sum(
            call.offered[depth - 1]
            for call in (each.results[name] for each in observations)
            if len(call.offered) >= depth
        )
        rows.append({"depth": depth, "offered": offered, **_flat(picked)})
    return rows


def _groups(run: Measurement, name: str | None, key: Callable[[Observation], Any]) -> dict[str, Any]:
    """The main figures of each group of prompts, in the order of its first appearance or of its number."""
    grouped: dict[Any, list[Observation]] = defaultdict(list)
    for each in run.observations:
        grouped[key(each)].append(each)
    if all(isinstance(label, int) for label in grouped):
        grouped = defaultdict(list, sorted(grouped.items()))
    kept = (
        "accepted_length",
        "accepted_drafted",
        "drafted_share",
        "s_wall",
        "tokens_per_s_plain",
        "tokens_per_s_draft",
    )
    return {
        _bucket_name(label) if isinstance(label, int) else str(label): {
            "n": len(members),
            "rounds": _count(members, name, lambda call: call.rounds),
            **_flat({one: figure for one, figure in _figures(members, name, run.seed).items() if one in kept}),
        }
        for label, members in grouped.items()
    }


def _bucket(observation: Observation) -> int:
    return sum(observation.prompt_tokens >= edge for edge in BUCKETS)


def _bucket_name(bucket: int) -> str:
    low = BUCKETS[bucket - 1] if bucket else 1
    return f"{low}-{BUCKETS[bucket] - 1}" if bucket < len(BUCKETS) else f"{low}+"


def _other(run: Measurement, system: System) -> dict[str, Any]:
    figures = _figures(run.observations, system.name, run.seed)
    kept = ("accepted_length", "s_wall", "s_model", "tokens_per_s_draft", "nodes_per_round", "t_verify", "t_draft")
    identical = _identical(run, system.name)
    return {"plan": system.name, "identical": identical, **_flat({name: figures[name] for name in kept})}


def _baseline(run: Measurement, system: System) -> dict[str, Any]:
    groups = [each.conversation for each in run.observations]
    plain = [each.results[PLAIN] for each in run.observations]
    other = [each.results[system.name] for each in run.observations]
    figures = metrics.speed_figures(plain, other, groups=groups, seed=run.seed)
    kept = {"s_wall": figures["s_wall"], "tokens_per_s": figures["tokens_per_s_draft"]}
    return {
        "about": system.about,
        "identical": _identical(run, system.name),
        "num_different": _differing(run.observations, system.name),
        **_flat(kept),
    }


def _requests(observations: Sequence[Observation], name: str | None) -> dict[str, list[Any]]:
    """Columns, one entry per request, from which every figure of the pooled table can be computed again."""
    columns: dict[str, list[Any]] = {
        "prompt": [f"{each.file}:{each.line}" for each in observations],
        "turn": [each.turn for each in observations],
        "prompt_tokens": [each.prompt_tokens for each in observations],
        "prompt_digest": [each.prompt_digest[:12] for each in observations],
    }
    for label, system in (("plain", PLAIN), ("draft", name)):
        if system is not None:
            calls = [each.results[system] for each in observations]
            columns[f"{label}_tokens"] = [call.tokens for call in calls]
            columns[f"{label}_wall"] = [round(call.wall, 4) for call in calls]
            columns[f"{label}_prefill"] = [round(call.prefill, 4) for call in calls]
    if name is not None:
        calls = [each.results[name] for each in observations]
        columns |= {"rounds": [call.rounds for call in calls], "accepted": [call.accepted for call in calls]}
    return columns


def _flat(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    """name and name_se for each figure; name_ci95 for speed ratios.  Figures by depth are reported elsewhere."""
    flat: dict[str, Any] = {}
    for name, figure in figures.items():
        if name[-1].isdigit():
            continue
        flat[name], flat[f"{name}_se"] = rounded(figure.value), rounded(figure.error)
        if name == "s_wall":
            flat["s_wall_ci95"] = None if figure.low is None else [rounded(figure.low), rounded(figure.high)]
    return flat


def _json(value: Any, *, indent: str) -> str:
    deeper = indent + " "
    if isinstance(value, Mapping) and value:
        inner = (f"{deeper}{json.dumps(str(key))}: {_json(item, indent=deeper)}" for key, item in value.items())
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        inner = (deeper + _json(item, indent=deeper) for item in value)
        return "[\n" + ",\n".join(inner) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=True, allow_nan=False)
