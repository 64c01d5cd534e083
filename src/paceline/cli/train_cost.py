"""`paceline train-cost`: what a training step of a recipe costs here, and where its time goes.

It reads options and prints; `training.cost` measures.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command


def train_cost(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a TOML file.", metavar="RECIPE.toml")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The record, JSON.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Change the recipe: section.field=value.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 10,
    force: Annotated[bool, typer.Option("--force", help="Replace a record that is there.")] = False,
) -> None:
    """Measure a training step: tokens/s, peak memory, time by part, and how near the machine's arithmetic it comes.

    One process, one micro-batch a step; nothing is kept of what it trains. A busy machine makes every figure worse.
    """
    import json

    import torch
    from rich.console import Console

    from paceline.cli._busy import busy_warning
    from paceline.cli._outputs import check_record_path
    from paceline.cli._progress import Bar
    from paceline.cli._tables import drawn
    from paceline.config import load_recipe
    from paceline.machine import set_threads
    from paceline.measure.report import training_cost_tables
    from paceline.store.files import write_text
    from paceline.store.manifest import close_manifest, open_manifest
    from paceline.training.cost import WARM_UP, measure_training, training_record
    from paceline.training.prepare import prepare, recipe_target

    settings = load_recipe(recipe, overrides=changes or [])
    set_threads(settings.training.threads, option="training.threads")
    check_record_path(out, may_replace=force)
    console = Console(highlight=False, soft_wrap=True)
    job = prepare(settings, target=recipe_target(settings, device="cpu"), say=console.print)
    notes = {"target": settings.target.name, "states": "captured" if settings.data.features else "online"}
    manifest = open_manifest(dtype=settings.training.precision, seed=settings.training.seed, notes=notes)
    bar = Bar(console, total=WARM_UP + steps, text="steps")
    with bar, busy_warning(console, threads=torch.get_num_threads()):
        cost = measure_training(job, steps=steps, watch=lambda done: bar.update(done, "steps"))
    record = training_record(cost, manifest=close_manifest(manifest).as_dict())
    write_text(out, json.dumps(record, indent=1) + "\n")
    for table in training_cost_tables(record):
        console.print(drawn(table))
    console.print(f"Written: {out}")


PLUGIN = Command(run=train_cost, group="Measure", order=50)
