"""Three pictures of a diagnosis: calibration, acceptance by depth, entropy; a colour for each draft.

It draws what the record holds and nothing else; how pictures are made and written is `measure.plots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from paceline.measure.plots import BLUE, GREEN, GREY, ORANGE, blank, require_matplotlib, save

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#D55E00", "#56B4E9")  # Okabe and Ito
Record = Mapping[str, Any]


def draw_diagnosis(record: Record, *, folder: Path, name: str) -> list[Path]:
    """Write NAME-calibration, NAME-acceptance and NAME-entropy as PNG and SVG; returns their paths.

    Raises ConfigError without matplotlib.
    """
    require_matplotlib()
    figures = {"calibration": _calibration(record), "acceptance": _acceptance(record), "entropy": _entropy(record)}
    return save(figures, folder=folder, name=name)


def _coloured(record: Record) -> Iterator[tuple[Record, str]]:
    return zip(record["drafts"], cycle(COLOURS), strict=False)


def _finish(axes: Any, record: Record, *, title: str, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(f"{title}: {record['plan']}, {record['n']} prompts")
    axes.legend(frameon=False, fontsize="small")


def _calibration(record: Record) -> Any:
    figure, axes = blank(width=6.0)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="as confident as right")
    for draft, colour in _coloured(record):
        for kind, style, marker in (("token", "-", "o"), ("path", "--", "s")):
            bins = [each for each in draft["calibration"][kind] if each["count"]]
            _errorbar(
                axes, [each["confidence"] for each in bins], bins, "accepted",
                label=f"{draft['name']}: q of a {kind}", color=colour, linestyle=style, marker=marker,
            )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    _finish(axes, record, title="Calibration", across="draft's confidence", up="share accepted")
    return figure


def _acceptance(record: Record) -> Any:
    figure, axes = blank(width=6.0)
    deepest = 1
    for draft, colour in _coloured(record):
        rows = draft["acceptance_by_depth"]
        deepest = max(deepest, len(rows))
        for kind, label, style, marker in (
            ("conditional", "if depth d - 1 was accepted", "-", "o"),
            ("cumulative", "of all rounds", "--", "s"),
        ):
            _errorbar(
                axes, [row["depth"] for row in rows], rows, kind,
                label=f"{draft['name']}: {label}", color=colour, linestyle=style, marker=marker,
            )  # fmt: skip
    axes.set_xticks(list(range(1, deepest + 1)))
    axes.set_ylim(0, 1)
    _finish(axes, record, title="Acceptance by depth", across="depth of the drafted token", up="share accepted")
    return figure


def _entropy(record: Record) -> Any:
    figure, axes = blank(width=6.0)
    for draft, colour in _coloured(record):
        step, histogram = draft["entropy"]["step"], draft["entropy"]["histogram"]
        for side, style in (("accepted", "-"), ("rejected", "--")):
            counts = histogram[side]
            edges = [place * step for place in range(len(counts) + 1)]
            axes.stairs(
                _densities(counts, step), edges, label=f"{draft['name']}: {side}", color=colour, linestyle=style
            )
    up = "density of laws"
    _finish(axes, record, title="Entropy of the draft", across="nats (last bin: and above)", up=up)
    return figure


def _densities(counts: Sequence[int], step: float) -> list[float]:
    whole = max(sum(counts), 1) * step
    return [number / whole for number in counts]


def _errorbar(axes: Any, across: Sequence[float], rows: Sequence[Record], name: str, **style: Any) -> None:
    values = [row[name] or 0.0 for row in rows]
    errors = [row[f"{name}_se"] or 0.0 for row in rows]
    axes.errorbar(across, values, yerr=errors, capsize=3, **style)
