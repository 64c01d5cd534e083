"""A synth run on disk: a folder that fills up, survives kill -9 and says how far it is.

rows.jsonl holds finished rows, dropped.jsonl the prompts that were given up and why, synth.json the settings.  It knows
how to go on, not how rows are made.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.answering import Answering, SynthOptions
from paceline.data.given import Given
from paceline.data.prompt_sources import Source
from paceline.data.rows import Message, reason_kind
from paceline.data.synth import Synth, load_seeds
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
    prompts: Sequence[Source] | None = None,
    report: Callable[[SynthProgress], None] = lambda progress: None,
) -> SynthProgress:
    """Fill `folder` until it holds at least `answer_tokens` answer tokens, or `prompts` are used up.

    fingerprint: what identifies the target; a folder written by another target or other settings is refused.
    prompts: None lets the target write them, from `seeds`.  Returns the final progress.
    Raises DataError, ConfigError when another process writes to the folder, OSError when the disk is full.
    """
    kept = {key: value for key, value in asdict(options).items() if key != "slots"}
    given = None if prompts is None else [f"{source.label} {source.digest}" for source in prompts]
    categories = load_seeds(seeds) if prompts is None else []
    with Claim(folder):
        _check_settings(folder, {**kept, "prompts": given, **fingerprint})
        with open_lines(folder / "dropped.jsonl") as dropped, open_lines(folder / "rows.jsonl") as rows:

            def on_drop(line: dict[str, Any]) -> None:
                append_line(dropped, line)

            if prompts is None:
                answering = Synth(target, options=options, categories=categories, on_drop=on_drop)
            else:
                answering = Given(target, options=options, sources=prompts, on_drop=on_drop)
            progress, done = _take_up(folder, answering)
            if progress.answer_tokens >= answer_tokens:
                return progress
            before = Counter(progress.dropped)
            for row in answering.rows(done):
                append_line(rows, row)
                progress.add(row["category"], row["answer_tokens"])
                progress.new_tokens += row["answer_tokens"]
                progress.dropped = before + answering.dropped
                report(progress)
                if progress.answer_tokens >= answer_tokens:
                    break
            progress.dropped = before + answering.dropped  # those behind the last row too
    return progress


def _take_up(folder: Path, answering: Answering) -> tuple[SynthProgress, set[int]]:
    """Where the folder stands, and the indices that are done; `answering` learns which prompts were asked."""
    progress, done = SynthProgress(), set[int]()
    for index, reason in read_lines(folder / "dropped.jsonl", read=lambda row: (int(row["index"]), str(row["reason"]))):
        done.add(index)
        progress.dropped[reason_kind(reason)] += 1
    for index, asked, category, tokens in read_lines(folder / "rows.jsonl", read=lambda row: _facts(row, answering)):
        done.add(index)
        answering.seen.add(asked)
        progress.add(category, tokens)
    return progress, done


def _facts(row: dict[str, Any], answering: Answering) -> tuple[int, str, str, int]:
    """Index, key of the prompt, category and answer tokens of a row."""
    messages: list[Message] = row["messages"]
    return int(row["index"]), answering.key(messages[:-1]), str(row["category"]), int(row["answer_tokens"])
