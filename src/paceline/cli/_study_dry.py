"""`paceline study --dry-run`: the grid, and what each cell would take; nothing is trained or measured.

Seconds come from what the study's folder holds already; without that, from arithmetic and a quick look at the
processor's peak.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from paceline.cli._study_folder import StudyFolder, finished_part
from paceline.cli._study_options import OpenedStudy
from paceline.cli._study_run import duration
from paceline.cli._tables import drawn
from paceline.errors import TargetError
from paceline.measure.table import Table
from paceline.store.architecture import read_architecture
from paceline.training.cost import machine_peak
from paceline.training.forecast import forecast
from paceline.training.study import Cell, Study

SHARE = 0.2  # of the processor's peak that a step reaches with the target online (docs/results, core-training-cost)


def print_dry_run(opened: OpenedStudy, out: Path, *, file: Path) -> None:
    """The cells, the time they would take, and what would be decoded."""
    study, folder, console = opened.study, StudyFolder(out), Console(highlight=False, soft_wrap=True)
    guessed = _guesses(opened, file=file)
    measured = _measured(opened, folder)
    rows = [_row(cell, folder, measured.get(cell.arm), guessed.get(cell.arm)) for cell in opened.cells]
    heads = ("cell", "same as baseline", "steps", "tokens, at most", "training, about", "state")
    console.print(drawn(Table(f"Study {study.study.name}: {len(opened.cells)} cells", heads, tuple(rows))))
    seconds = [_seconds(cell, measured.get(cell.arm), guessed.get(cell.arm)) for cell in opened.cells]
    known = [each for each in seconds if each is not None]
    source = "measured steps" if measured else f"arithmetic at {SHARE:.0%} of this processor's peak"
    if known:
        console.print(f"training, all cells: about {duration(sum(known))}, by {source}")
    console.print(_decoding(study))


def _row(cell: Cell, folder: StudyFolder, measured: float | None, guessed: float | None) -> tuple[str, ...]:
    if cell.recipe is None:
        return (cell.name, "-", "-", "-", "-", "finished draft")
    training, costs = cell.recipe.training, finished_part(folder.cell(cell))
    state = "done" if costs is not None else "begun" if folder.cell(cell).is_dir() else "to do"
    seconds = _seconds(cell, measured, guessed)
    steps = "by epochs" if training.steps is None else str(training.steps)
    tokens = "-" if training.steps is None else f"{training.steps * training.tokens_per_batch * training.accumulation}"
    if cell.equal == "seconds":
        steps, tokens = f"as many as take {steps} of the baseline's", "-"
    return (cell.name, cell.equal, steps, tokens, "-" if seconds is None else duration(seconds), state)


def _seconds(cell: Cell, measured: float | None, guessed: float | None) -> float | None:
    """Of a cell's training, by a step's; one of equal seconds takes as long as the baseline, whatever its steps."""
    per_step = measured if measured is not None else guessed
    if cell.recipe is None or cell.recipe.training.steps is None or per_step is None:
        return None
    return per_step * cell.recipe.training.steps


def _measured(opened: OpenedStudy, folder: StudyFolder) -> dict[str, float]:
    """arm -> seconds of a step, where a cell of it is finished."""
    found: dict[str, float] = {}
    for cell in opened.cells:
        costs = finished_part(folder.cell(cell)) if cell.recipe is not None else None
        if costs is not None and costs.steps:
            found[cell.arm] = costs.seconds / costs.steps
    return found


def _guesses(opened: OpenedStudy, *, file: Path) -> dict[str, float]:
    """arm -> seconds of a step by arithmetic; nothing where the target's architecture is not on this machine."""
    found: dict[str, float] = {}
    for cell in opened.cells:
        if cell.recipe is None or cell.arm in found:
            continue
        recipe = cell.recipe
        try:
            architecture = read_architecture(recipe.target, recipes=[file, Path(opened.study.study.recipe)])
        except TargetError:
            return {}
        counted = forecast(recipe, architecture)
        peak = machine_peak(torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32)
        found[cell.arm] = counted.operations_per_token * counted.tokens_per_step / (peak * 1e9 * SHARE)
    return found


def _decoding(study: Study) -> str:
    measure = study.measure
    prompts = len(measure.workloads) * measure.prompts_per_file
    systems = 1 + len(study.arms) * len(measure.plans)
    runs = len(study.study.seeds) * len(measure.temperatures)
    return (
        f"measuring: {runs} interleaved runs (seeds x temperatures) of at most {prompts} prompts, {systems} decoders "
        f"(plain, and {len(study.arms)} arms x {len(measure.plans)} plans), at most {measure.max_new_tokens} new "
        f"tokens each: {runs * prompts * systems} answers"
    )
