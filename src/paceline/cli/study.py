"""`paceline study`: train and measure a grid of drafts as one command that goes on where it was stopped.

It reads options only: `training.study` reads the file, `_study_run` does the parts in their order.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command

DIFFERENT = 1  # exit code when float32 greedy outputs differ, which must never happen


def study(
    file: Annotated[Path, typer.Argument(help="Study, a TOML file.", metavar="STUDY.toml")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the study: cells, measurements, results.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="Change the study: section.field=value. May be given several times."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print cells, steps, tokens and time, and run nothing.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="Also write the study's record there.")
    ] = None,
    pair: Annotated[
        Path | None,
        typer.Option("--pair", metavar="FILE", help="Also write the record of the comparison of section [pair]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace records that are there.")] = False,
) -> None:
    """Train each arm of a study with each seed, decode the same prompts with all of them, and say what is gained.

    One process at a time. A finished part is never done twice: the same command goes on after a kill, and does what a
    changed study adds. OUT/study.md and OUT/study.json hold means, standard errors and paired differences. Exit code
    1: greedy float32 outputs differed.
    """
    from paceline.cli._study_options import StudyOptions, open_study

    options = StudyOptions(file, out, tuple(changes or ()), record, pair, force)
    opened = open_study(options)
    if dry_run:
        from paceline.cli._study_dry import print_dry_run

        print_dry_run(opened, out, file=file)
        return
    from paceline.cli._study_options import run_study

    if run_study(options, opened):
        raise typer.Exit(DIFFERENT)


PLUGIN = Command(run=study, group="Measure", order=20)
