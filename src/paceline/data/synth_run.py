"""A synth run on disk: a folder that fills up, survives kill -9 and says how far it is.

rows.jsonl holds finished rows, dropped.jsonl the indices that were given up and why, synth.json the settings.  It knows
how to go on, not how rows are made.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from paceline.data.synth import Synth, SynthOptions, load_seeds
from paceline.errors import DataError
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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file that we wrote; a torn last line (kill -9) is cut off the file."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    for line in data[:whole].splitlines():
        yield json.loads(line)


def append_line(file: TextIO, row: dict[str, Any]) -> None:
    """One row, one line, handed to the system at once."""
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "synth.json"
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        different = [key for key in settings if found.get(key) != settings[key]]
        if different:
            key = different[0]
            raise DataError(
                f"{folder.name}: was written with {key} = {found.get(key)}, now {settings[key]}; "
                "use the same settings to go on, or another --out"
            )
    else:
        path.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")


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
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in asdict(options).items() if key != "slots"}
    _check_settings(folder, {**kept, **fingerprint})
    progress, done = SynthProgress(), set()
    with (folder / "dropped.jsonl").open("a", encoding="utf-8") as dropped:
        synth = Synth(
            target,
            options=options,
            categories=load_seeds(seeds),
            on_drop=lambda index, why: append_line(dropped, {"index": index, "reason": why}),
        )
        for row in read_lines(folder / "dropped.jsonl"):
            done.add(row["index"])
            progress.dropped[row["reason"]] += 1
        for row in read_lines(folder / "rows.jsonl"):
            done.add(row["index"])
            synth.seen.add(" ".join(row["messages"][-2]["content"].lower().split()))
            _count(progress, row)
        if progress.answer_tokens >= answer_tokens:
            return progress
        before = Counter(progress.dropped)
        with (folder / "rows.jsonl").open("a", encoding="utf-8") as rows:
            for row in synth.rows(index for index in itertools.count() if index not in done):
                append_line(rows, row)
                _count(progress, row)
                progress.new_tokens += row["answer_tokens"]
                progress.dropped = before + synth.dropped
                report(progress)
                if progress.answer_tokens >= answer_tokens:
                    break
    return progress


def _count(progress: SynthProgress, row: dict[str, Any]) -> None:
    progress.rows += 1
    progress.answer_tokens += row["answer_tokens"]
    progress.by_category[row["category"]] += row["answer_tokens"]
