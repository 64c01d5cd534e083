"""A forecast as lines and tables: what a recipe will need on so many devices of such a speed.

It knows figures and their units; they are computed in `training.forecast`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import Recipe
from paceline.measure.table import Table
from paceline.store.figures import size_text
from paceline.training.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Devices:
    """What a run is given.  tflops: peak of one device.  share: of it that is reached."""

    count: int
    tflops: float
    share: float


def forecast_tables(found: Forecast) -> list[Table]:
    """Memory, and the draft's weights."""
    return [_memory(found), _shapes(found)]


def forecast_lines(recipe: Recipe, found: Forecast, *, devices: Devices) -> list[str]:
    """What the run will need, one line each."""
    is_online = recipe.data.features is None
    hours = found.seconds(per_second=devices.tflops * 1e12, share=devices.share)
    rows = (
        ("target", f"{recipe.target.name}, {found.target_parameters / 1e9:.3g} G parameters ({found.target_source})"),
        ("draft", f"{recipe.draft.name}, {found.draft_parameters / 1e6:.1f} M parameters"),
        ("taps", ", ".join(map(str, found.taps))),
        ("objective", f"{recipe.objective.name}, {found.passes} draft passes over a batch"),
        ("optimiser steps", "as the rows give (training.epochs)" if found.steps is None else f"{found.steps:,}"),
        ("tokens of a step, at most", f"{found.tokens_per_step * devices.count:,} on {devices.count} devices"),
        ("tokens of the run, at most", "-" if found.tokens is None else f"{found.tokens * devices.count:,}"),
        ("target runs", "with every batch" if is_online else "not at all: its states are captured"),
        ("operations of a token", f"{found.operations_per_token:.3g}"),
        ("hours of each device", "-" if hours is None else f"{hours / 3600:,.1f}"),
        ("device hours", "-" if hours is None else f"{hours / 3600 * devices.count:,.1f}"),
        ("at", f"{devices.share:.0%} of {devices.tflops:g} TFLOP/s, on each of {devices.count} devices"),
        (
            "captured states, if they are stored",
            f"{found.stored_per_token:,} bytes a token in bfloat16: "
            f"{size_text(found.stored_per_token * 10**6)} for a million tokens",
        ),
    )
    return [f"{name}: {value}" for name, value in rows]


def _memory(found: Forecast) -> Table:
    rows = [(name, size_text(size)) for name, size in found.memory.items()]
    rows.append(("all, about", size_text(sum(found.memory.values()))))
    return Table("Memory of each device", ("what", "bytes"), tuple(rows))


def _shapes(found: Forecast) -> Table:
    rows = tuple((name, " x ".join(map(str, shape))) for name, shape in found.shapes.items())
    return Table("The draft's weights", ("name", "shape"), rows)
