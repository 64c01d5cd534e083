"""What a run writes down: one JSON line per event, always, and the same numbers to a tracker if there is one.

Averages are kept as numerators and denominators, so that they are right over batches, steps and processes of any size.
This module knows neither draft nor loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.store.files import write_text

LOG = "log.jsonl"
SHOWN = 40  # bytes of a line that an error shows


class Meter:
    """Sums since the last log line: name -> (numerator, denominator), and plain counts.

    Floats of Python, hence float64; a state saves them exactly.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        values = values or {}
        self.ratios: dict[str, list[float]] = {name: list(pair) for name, pair in values.get("ratios", {}).items()}
        self.counts: dict[str, float] = dict(values.get("counts", {}))

    def add_ratio(self, name: str, *, numerator: float, denominator: float) -> None:
        """Add to both sums of a ratio."""
        pair = self.ratios.setdefault(name, [0.0, 0.0])
        pair[0] += numerator
        pair[1] += denominator

    def add_count(self, name: str, amount: float) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0.0) + amount

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add what another process has (its `values`)."""
        for name, (numerator, denominator) in other["ratios"].items():
            self.add_ratio(name, numerator=numerator, denominator=denominator)
        for name, amount in other["counts"].items():
            self.add_count(name, amount)

    def values(self) -> dict[str, Any]:
        """Plain values, from which a meter is made again."""
        return {"ratios": {name: list(pair) for name, pair in self.ratios.items()}, "counts": dict(self.counts)}

    def averages(self) -> dict[str, float | None]:
        """Each ratio; None where its denominator is 0."""
        return {name: top / bottom if bottom else None for name, (top, bottom) in self.ratios.items()}


class RunLog:
    """Appends events to OUT/log.jsonl; a line is handed to the system at once.

    keep_until: on resume, lines of later steps are removed, so that the file reads like that of one run.
    track: also told every number, as (names "event/name" -> value, step).
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_until: int | None = None,
        track: Callable[[dict[str, float], int], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG
        kept = [] if keep_until is None else [event for event in read_log(self.path) if event["step"] <= keep_until]
        write_text(self.path, "".join(json.dumps(event) + "\n" for event in kept))
        self._track = track

    def write(self, event: str, *, step: int, values: Mapping[str, Any]) -> None:
        """One line: the kind of event, the step, and plain values."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        if self._track is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            self._track({f"{event}/{name}": float(value) for name, value in numbers.items()}, step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a last line torn by a kill is left out.  Raises DataError naming a line that is no event."""
    if not path.is_file():
        return []
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    if lines and _event(lines[-1][1]) is None:
        lines.pop()
    return [_whole(line, where=f"{path}: line {number}") for number, line in lines]


def _whole(line: bytes, *, where: str) -> dict[str, Any]:
    event = _event(line)
    if not isinstance(event, dict) or type(event.get("step")) is not int:  # pyright: ignore[reportUnknownMemberType]
        found = line[:SHOWN].decode("utf-8", "backslashreplace")
        raise DataError(f"{where}: found {found}, expected an event with its step; remove the line and resume")
    return event  # pyright: ignore[reportUnknownVariableType]


def _event(line: bytes) -> object:
    """What a line says; None if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None
