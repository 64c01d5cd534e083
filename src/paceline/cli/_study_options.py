"""What `paceline study` is asked for, checked before hours are spent on it, and what it leaves behind.

It knows the order of checks; the parts are for `_study_run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.cli._opening import check_draft
from paceline.cli._outputs import check_record_path
from paceline.cli._plans import parse_plan
from paceline.cli._study_folder import StudyFolder
from paceline.cli._study_run import StudyRun
from paceline.cli._tables import drawn
from paceline.errors import ConfigError
from paceline.machine import check_device, check_threads
from paceline.measure.record import write_record
from paceline.measure.study import StudyResult, any_differs, pair_record, study_record
from paceline.measure.study_tables import pair_tables, study_tables
from paceline.measure.workloads import load_workload
from paceline.store.files import Claim
from paceline.training.prepare import check_plugins
from paceline.training.study import Cell, Study, load_study, study_cells


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """All options of `paceline study`, as its help explains them."""

    file: Path
    out: Path
    changes: tuple[str, ...]
    record: Path | None
    pair: Path | None
    force: bool


@dataclass(frozen=True, slots=True)
class OpenedStudy:
    """A study that can begin: everything that a person can mend was looked at."""

    study: Study
    cells: list[Cell]


def open_study(options: StudyOptions) -> OpenedStudy:
    """Read and check.  Raises ConfigError, CheckpointError or DataError, one line."""
    study = load_study(options.file, overrides=options.changes)
    cells = study_cells(study)
    for plan in study.measure.plans:
        parse_plan(plan, option="measure.plans")
    for cell in cells:
        if cell.recipe is not None:
            _check_recipe(cell)
        for given, what in ((cell.start, "warm_start"), (cell.draft, "draft")):
            if given is not None:
                check_draft(given, option=f"arm {cell.arm}: {what}", others=())
    check_device(study.measure.device)
    if study.measure.threads is not None:
        check_threads(study.measure.threads, option="measure.threads")
    for option, path in (("--record", options.record), ("--pair", options.pair)):
        if path is not None:
            check_record_path(path, may_replace=options.force, option=option)
    if options.pair is not None and study.pair is None:
        raise ConfigError(f"--pair: {options.file} has no section [pair]; expected arm, plan and temperature there")
    return OpenedStudy(study, cells)


def run_study(options: StudyOptions, opened: OpenedStudy) -> bool:
    """Run, print, write records.  Returns whether greedy float32 outputs differed."""
    study, console = opened.study, Console(highlight=False, soft_wrap=True)
    load_workload(study.measure.workloads, prompts_per_file=study.measure.prompts_per_file)  # refused before training
    folder = StudyFolder(options.out)
    folder.check()
    with Claim(options.out):
        folder.begin(study)
        result = StudyRun(study, opened.cells, folder, console).run()
    record = study_record(result)
    for table in study_tables(record):
        console.print(drawn(table))
    console.print(f"results: {options.out / 'study.md'}")
    if options.pair is not None:
        _write_pair(result, study, path=options.pair, console=console)
    if options.record is not None:
        write_record(options.record, record)
        console.print(f"record: {options.record}")
    return study.measure.dtype == "float32" and any_differs(result)


def _write_pair(result: StudyResult, study: Study, *, path: Path, console: Console) -> None:
    assert study.pair is not None, "open_study has refused it"
    pair = study.pair
    record = pair_record(result, arm=pair.arm, plan=pair.plan, temperature=pair.temperature)
    write_record(path, record)
    for table in pair_tables(record):
        console.print(drawn(table))
    console.print(f"record: {path}")


def _check_recipe(cell: Cell) -> None:
    assert cell.recipe is not None
    try:
        check_plugins(cell.recipe)
    except ConfigError as error:
        raise ConfigError(f"arm {cell.arm}: {error}") from error
