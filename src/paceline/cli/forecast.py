"""`paceline forecast`: what a recipe will need, before a target is downloaded or a device is rented.

It reads options and prints; `training.forecast` counts.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command

H100 = 989.0  # TFLOP/s in bfloat16, dense, as its maker states for the SXM version
SHARE = 0.35  # of the peak that such training reaches on it: an assumption, not a measurement


def forecast(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a TOML file.", metavar="RECIPE.toml")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Change the recipe: section.field=value.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Processes, one on each device.")] = 1,
    tflops: Annotated[float, typer.Option(min=0.001, help="Peak of one device; default: H100 SXM, bfloat16.")] = H100,
    share: Annotated[float, typer.Option(min=0.001, max=1.0, help="Share of the peak that is reached.")] = SHARE,
) -> None:
    """Print a recipe's tokens, steps, memory, hours per device and the draft's shapes; nothing is loaded or run.

    The target is built without weights, from a file of facts in targets/ beside the recipe or from its config.json on
    this machine. Tokens count padding, so they are upper bounds; memory and hours are estimates.
    """
    from rich.console import Console

    from paceline.cli._forecast_tables import Devices, forecast_lines, forecast_tables
    from paceline.cli._tables import drawn
    from paceline.config import load_recipe
    from paceline.store.architecture import read_architecture
    from paceline.training.forecast import forecast as count
    from paceline.training.prepare import check_plugins

    settings = load_recipe(recipe, overrides=changes or [])
    check_plugins(settings)
    found = count(settings, read_architecture(settings.target, recipes=[recipe]))
    console = Console(highlight=False, soft_wrap=True)
    for line in forecast_lines(settings, found, devices=Devices(devices, tflops, share)):
        console.print(line, markup=False)
    for table in forecast_tables(found):
        console.print(drawn(table))


PLUGIN = Command(run=forecast, group="Train", order=30)
