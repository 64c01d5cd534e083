"""A synth run on disk: a folder that fills up, survives kill -9 and says how far it is.

rows.jsonl holds finished rows, dropped.jsonl the indices that were given up and why, synth.json the settings.  It knows
how to go on, not how rows are made.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.synth import Synth, SynthOptions, load_seeds
from paceline.errors import DataError
from paceline.store.files import Claim, write_text
from paceline.store.lines import append_line, open_lines, read_lines
from paceline.targets.generic import Target


@dataclass(slots=True)
class SynthProgress:
    """Where a run stands: rows and answer tokens on disk, drops by reason, tokens per second of this session."""

    rows: int = 0
    answer_tokens: int = 0
    by_category: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    new_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Answer tokens per second since this session started."""
        return self.new_tokens / max(time.monotonic() - self.started, 1e-9)

    def add(self, category: str, answer_tokens: int) -> None:
        """Count a row."""
        self.rows += 1
        self.answer_tokens += answer_tokens
        self.by_category[category] += answer_tokens


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raises DataError, before anything is touched, for rows of others and for a run with other settings."""
    path = folder / "synth.json"
    if not path.exists():
        for name in ("rows.jsonl", "dropped.jsonl"):
            there = folder / name
            if there.exists() and (not there.is_file() or there.stat().st_size):
                raise DataError(f"{there} is there without the synth.json of a run; move it, or choose another --out")
        write_text(path, json.dumps(settings, indent=1) + "\n")
        return
    try:
        found = {**asdict(SynthOptions()), **dict(json.loads(path.read_bytes()))}  # an older run lacks newer options
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not the settings of a run ({error}); restore it, or choose another --out") from error
    different = [key for key in settings if found.get(key) != settings[key]]
    if different:
        key = different[0]
        raise DataError(
            f"{folder.name}: was written with {key} = {found.get(key)}, now {settings[key]}; "
            "use the same settings to go on, or another --out"
        )


def run_synth(
    target: Target,
    *,
    folder: Path,
    options: SynthOptions,
    answer_tokens: int,
    fingerprint: dict[str, Any],
    seeds: Path | None = None,
    report: Callable[[SynthProgress], None] = lambda progress: None,
) -> SynthProgress:
    """Fill `folder` until it holds at least `answer_tokens` answer tokens; returns the final progress.

    fingerprint: what identifies the target; a folder written by another target or other settings is refused.
    Raises DataError, ConfigError when another process writes to the folder, OSError when the disk is full.
    """
    kept = {key: value for key, value in asdict(options).items() if key != "slots"}
    categories = load_seeds(seeds)
    with Claim(folder):
        _check_settings(folder, {**kept, **fingerprint})
        with open_lines(folder / "dropped.jsonl") as dropped, open_lines(folder / "rows.jsonl") as rows:
            synth = Synth(
                target,
                options=options,
                categories=categories,
                on_drop=lambda index, why: append_line(dropped, {"index": index, "reason": why}),
            )
            progress, done = _take_up(folder, synth)
            if progress.answer_tokens >= answer_tokens:
                return progress
            before = Counter(progress.dropped)
            for row in synth.rows(index for index in itertools.count() if index not in done):
                append_line(rows, row)
                progress.add(row["category"], row["answer_tokens"])
                progress.new_tokens += row["answer_tokens"]
                progress.dropped = before + synth.dropped
                report(progress)
                if progress.answer_tokens >= answer_tokens:
                    break
    return progress


def _take_up(folder: Path, synth: Synth) -> tuple[SynthProgress, set[int]]:
    """Where the folder stands, and the indices that are done; `synth` learns which prompts were asked."""
    progress, done = SynthProgress(), set[int]()
    for index, reason in read_lines(folder / "dropped.jsonl", read=lambda row: (int(row["index"]), str(row["reason"]))):
        done.add(index)
        progress.dropped[reason] += 1
    for index, prompt, category, tokens in read_lines(folder / "rows.jsonl", read=_row_facts):
        done.add(index)
        synth.seen.add(" ".join(prompt.lower().split()))
        progress.add(category, tokens)
    return progress, done


def _row_facts(row: dict[str, Any]) -> tuple[int, str, str, int]:
    """Index, prompt, category and answer tokens of a row."""
    return int(row["index"]), str(row["messages"][-2]["content"]), str(row["category"]), int(row["answer_tokens"])
