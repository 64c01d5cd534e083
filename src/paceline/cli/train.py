"""`paceline train`: run a recipe and show how it goes; what training is belongs to `paceline.training`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._base import Command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a TOML file.", metavar="RECIPE.toml")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run: best/, last/, state/, log.jsonl.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="Change the recipe: section.field=value. May be given several times."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last state in --out; begin where there is none.")
    ] = False,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", help="Start the weights and the vocabulary from this draft's folder.")
    ] = None,
) -> None:
    """Train a draft for a target as a recipe says.

    Prints rows, supervised tokens and steps before it begins. The draft with the highest simulated accepted length
    on held-out rows is kept in OUT/best. A run that was stopped or killed goes on with --resume, to the same weights.

    Several devices: accelerate launch -m paceline.cli train RECIPE.toml --out OUT
    """
    from rich.console import Console

    from paceline.cli._progress import interruptible
    from paceline.config import load_recipe
    from paceline.store.training_state import saved_states
    from paceline.training.folder import STATE
    from paceline.training.trainer import train as run

    settings = load_recipe(recipe, overrides=changes or [])
    console = Console(highlight=False, soft_wrap=True)

    def kept() -> str:
        states = saved_states(out / STATE)
        if not states:
            return "no state was saved yet; begin again with the same command and --resume"
        return f"step {int(states[-1].name.rpartition('-')[2])} is kept in {out / STATE}; go on with --resume"

    with interruptible(kept), _Screen(console) as screen:
        run(settings, out=out, watch=screen, resume=resume, init_from=init_from)


class _Screen:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._progress: Progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._rate: float | None = None

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line, above the bar."""
        style = "yellow" if text.startswith("warning") else None
        self._console.print(text, style=style, markup=False)

    def step(self, done: int, total: int, values: Mapping[str, Any]) -> None:
        """Move the bar."""
        rate = values["tokens"] / max(values["seconds"], 1e-9)
        self._rate = rate if self._rate is None else 0.9 * self._rate + 0.1 * rate
        figures = f"loss {_figure(values['loss'], '.3f')}  L {_figure(values['accepted_length'], '.2f')}  "
        figures += f"{self._rate:,.0f} tokens/s"
        if self._task is None:
            self._task = self._progress.add_task("", total=total, completed=done - 1, figures=figures)
        self._progress.update(self._task, completed=done, figures=figures)

    def line(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """A line of the log, where there is no bar."""
        if event == "train" and not self._console.is_terminal:
            right = _figure(values.get("accuracy_0"), ".3f")
            self.say(
                f"step {step}: loss {_figure(values['loss'], '.4f')}, first guess right {right}, "
                f"rate {values['learning_rate']:.2e}, gradient {values['gradient_norm']:.3f}, "
                f"{values['tokens_per_s']:,.0f} tokens/s, {values['seconds']:.0f} s"
            )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


PLUGIN = Command(run=train, group="Train", order=10)
