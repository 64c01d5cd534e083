"""What a benchmark has measured so far, kept beside the record so that a killed run goes on where it stopped.

One JSON line per conversation behind a line of settings; a run with other settings is refused.  It knows no metric.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.measure.metrics import Measured
from paceline.store.files import Claim
from paceline.store.lines import append_line, open_lines, read_lines

_BEGINNING = b'{"settings": '  # of every side file; of one that a kill cut off, a part of it


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a greedy output left the plain one.

    position: index of the first differing new token.  plain, other: the two tokens, None where that output had ended.
    gap: difference of the target's two best logits there; step: distance of neighbouring numbers of the target's dtype
    at the best logit.  A gap below one step is a tie that rounding may break either way.
    """

    position: int
    plain: int | None
    other: int | None
    gap: float
    step: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One prompt through every decoder.

    conversation, turn: its place in the workload.  file, line: where it stands.  prompt_tokens, prompt_digest: what the
    target was given.  results: decoder -> what was measured.  mismatches: decoder -> where its greedy output differs.
    """

    conversation: int
    turn: int
    file: str
    line: int
    prompt_tokens: int
    prompt_digest: str
    results: dict[str, Measured]
    mismatches: dict[str, Mismatch]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the side file: one of settings, a sitting, a record, and a conversation with its observations.

    replaces: paths of the records that the run may replace when it goes on.
    """

    settings: dict[str, Any] | None = None
    sitting: str | None = None
    replaces: list[str] = field(default_factory=list[str])
    conversation: int | None = None
    observations: list[Observation] = field(default_factory=list[Observation])


class Ledger:
    """The side file of a record, `NAME.json.partial`.

    done: conversation -> its observations.  sittings: UTC times at which a process began to add to it.
    """

    def __init__(
        self, record: Path, *, settings: Mapping[str, Any], resume: bool, replaces: Sequence[Path] = ()
    ) -> None:
        """Open or begin.  Raises as `refuse_leftover`, and DataError on other settings or a line that is not ours.

        replaces: records that the user has given up; see `replaceable`.
        """
        self.path = side_file(record)
        refuse_leftover(record, resume=resume)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = open_lines(self.path)
        try:
            self._claim = Claim(self.path, is_folder=False)
            self._take_up(json.loads(json.dumps(settings)), replaces=replaces)
        except (PacelineError, OSError):
            self._stream.close()
            raise

    def _take_up(self, settings: dict[str, Any], *, replaces: Sequence[Path]) -> None:
        """Read what was measured, and open a sitting."""
        lines = list(read_lines(self.path, read=_line))
        measured = [line for line in lines if line.conversation is not None]
        if not measured:
            self._stream.truncate(0)  # nothing was measured: begin anew, whatever the settings were
            lines = []
        self._check(lines, settings=settings)
        self.done = {line.conversation: line.observations for line in measured if line.conversation is not None}
        self.sittings = [line.sitting for line in lines if line.sitting is not None]
        if not lines:
            append_line(self._stream, {"settings": settings})
        self.sittings.append(datetime.now(UTC).isoformat(timespec="seconds"))
        append_line(self._stream, {"sitting": self.sittings[-1], "replaces": _spelled(replaces)})

    def add(self, conversation: int, observations: list[Observation]) -> None:
        """Keep a conversation's observations; once this returns a kill does not lose them."""
        self.done[conversation] = observations
        line = {"conversation": conversation, "observations": [asdict(each) for each in observations]}
        append_line(self._stream, line)

    def begin_record(self, record: Path) -> None:
        """A record is about to be written: a run that is stopped from here on finds it, and may replace it."""
        append_line(self._stream, {"replaces": _spelled([record])})

    def close(self) -> None:
        """Stop writing; the file stays."""
        self._stream.close()
        self._claim.release()

    def remove(self) -> None:
        """The record is written: the side file is no longer needed."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _check(self, lines: list[_Line], *, settings: dict[str, Any]) -> None:
        found = (lines[0].settings or {}) if lines else settings
        different = [key for key in {**found, **settings} if found.get(key) != settings.get(key)]
        if different:
            key = different[0]
            raise DataError(
                f"{self.path.name} was measured with {key} = {found.get(key)}, now {settings.get(key)}; "
                "use the same settings to go on, or delete it"
            )


def side_file(record: Path) -> Path:
    """Where the ledger of a record stands."""
    return record.with_name(record.name + ".partial")


def refuse_leftover(record: Path, *, resume: bool) -> None:
    """Raises ConfigError when a run writes there, or an earlier one left measurements and nobody asked to go on.

    Raises DataError when what stands there is not ours.
    """
    kept = sum(line.conversation is not None for line in _leftover(record))
    if kept and not resume:
        raise ConfigError(
            f"{side_file(record).name} holds {kept} conversations of an earlier run; go on with --resume, or delete it"
        )


def replaceable(record: Path) -> frozenset[Path]:
    """Records that a stopped run with measurements was told to replace, or had begun to write: it may when it goes on.

    record: the run's first.  Raises as `refuse_leftover`.
    """
    lines = _leftover(record)
    if all(line.conversation is None for line in lines):
        return frozenset()
    return frozenset(Path(each) for line in lines for each in line.replaces)


def _leftover(record: Path) -> list[_Line]:
    """What an earlier run left beside a record; a file that is not ours is not touched."""
    path = side_file(record)
    if not path.is_file():
        return []
    with Claim(path, is_folder=False):
        with path.open("rb") as file:
            if not _BEGINNING.startswith(file.read(len(_BEGINNING))):
                raise DataError(f"{path}: not the side file of a benchmark; move it, or choose another --out")
        return list(read_lines(path, read=_line))


def _spelled(records: Sequence[Path]) -> list[str]:
    return [str(record.resolve()) for record in records]


def _line(line: dict[str, Any]) -> _Line:
    if "settings" in line:
        return _Line(settings=dict(line["settings"]))
    if "sitting" in line:
        return _Line(sitting=str(line["sitting"]), replaces=list(map(str, line.get("replaces", []))))
    if "replaces" in line:
        return _Line(replaces=list(map(str, line["replaces"])))
    return _Line(
        conversation=int(line["conversation"]), observations=[read_observation(one) for one in line["observations"]]
    )


def read_observation(line: Mapping[str, Any]) -> Observation:
    """The inverse of `dataclasses.asdict`, after a way through JSON."""
    results = {name: Measured.from_json(each) for name, each in line["results"].items()}
    mismatches = {name: Mismatch(**each) for name, each in line["mismatches"].items()}
    plain = {key: value for key, value in line.items() if key not in ("results", "mismatches")}
    return Observation(**plain, results=results, mismatches=mismatches)
