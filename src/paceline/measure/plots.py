"""Two pictures of a record: acceptance by depth, and tokens per second of every decoder.

It needs the optional package matplotlib, draws without a display and knows nothing that is not in the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.store.files import file_aside

# Okabe and Ito's palette, told apart by every kind of colour vision.
GREY, BLUE, ORANGE, GREEN = "#999999", "#0072B2", "#E69F00", "#009E73"
FORMATS = ("png", "svg")
DOTS_PER_INCH = 160


def require_matplotlib() -> None:
    """Raises ConfigError when matplotlib is not installed; asked before a long run, not after it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plots needs the package `matplotlib`; run: pip install matplotlib")


def draw(record: Mapping[str, Any], *, folder: Path, name: str) -> list[Path]:
    """Write NAME-acceptance and NAME-speed as PNG and SVG; returns their paths.  Raises ConfigError."""
    require_matplotlib()
    figures = {"speed": _speed(record)}
    if record["acceptance_by_depth"]:
        figures["acceptance"] = _acceptance(record)
    return save(figures, folder=folder, name=name)


def save(figures: Mapping[str, Any], *, folder: Path, name: str) -> list[Path]:
    """Write each figure as NAME-KIND.png and .svg; returns the paths.  figures: kind -> figure of matplotlib."""
    written: list[Path] = []
    for kind, figure in figures.items():
        for suffix in FORMATS:
            path = folder / f"{name}-{kind}.{suffix}"
            with file_aside(path) as aside:
                figure.savefig(aside, format=suffix, dpi=DOTS_PER_INCH)
            written.append(path)
    return written


def _acceptance(record: Mapping[str, Any]) -> Any:
    rows = record["acceptance_by_depth"]
    depths = [row["depth"] for row in rows]
    figure, axes = blank(width=6.0)
    for kind, label, colour, marker in (
        ("conditional", "if depth d - 1 was accepted", BLUE, "o"),
        ("cumulative", "of all rounds", ORANGE, "s"),
    ):
        values = [row[kind] or 0.0 for row in rows]
        errors = [row[f"{kind}_se"] or 0.0 for row in rows]
        axes.errorbar(depths, values, yerr=errors, label=label, color=colour, marker=marker, capsize=3)
    axes.set_xticks(depths)
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth of the drafted token")
    axes.set_ylabel("share accepted")
    axes.set_title(f"Acceptance by depth: {record['plan']}, n = {record['n']}")
    axes.legend(frameon=False)
    return figure


def _speed(record: Mapping[str, Any]) -> Any:
    bars: list[tuple[str, Mapping[str, Any], str, str]] = [("plain", record, "tokens_per_s_plain", GREY)]
    if record["plan"] is not None:
        bars.append((record["plan"], record, "tokens_per_s_draft", GREEN))
    bars += [(each["plan"], each, "tokens_per_s_draft", BLUE) for each in record["other_plans"]]
    bars += [(name, each, "tokens_per_s", ORANGE) for name, each in record["baselines"].items()]
    figure, axes = blank(width=1.6 + 1.5 * len(bars))
    values = [source[key] or 0.0 for _, source, key, _ in bars]
    errors = [source[f"{key}_se"] or 0.0 for _, source, key, _ in bars]
    drawn = axes.bar([_two_lines(label) for label, *_ in bars], values, yerr=errors, capsize=3)
    _paint(drawn, [colour for *_, colour in bars])
    axes.bar_label(drawn, labels=[f"{value:.1f}" for value in values], padding=3)
    axes.set_ylabel("tokens per second, whole call")
    axes.set_title(f"Speed, n = {record['n']}")
    axes.margins(y=0.15)
    return figure


def _paint(bars: Any, colours: Sequence[str]) -> None:
    for bar, colour in zip(bars, colours, strict=True):
        bar.set_color(colour)


def _two_lines(label: str) -> str:
    return label.replace(", ", ",\n", 1)


def blank(*, width: float) -> tuple[Any, Any]:
    """A figure of its own, outside pyplot's global state, and its axes.  width: inches."""
    figure = import_module("matplotlib.figure").Figure(figsize=(width, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
