"""Progress of long work: a bar with the time left on a terminal, a line a minute where the output is a file.

And its end by Ctrl-C: one line that says what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from paceline.errors import Interrupted

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 60.0  # seconds between two lines


@contextmanager
def interruptible(kept: Callable[[], str]) -> Generator[None, None, None]:
    """Turn Ctrl-C inside the block into Interrupted.  kept: asked then for what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {kept()}") from None


class Bar:
    """Counts `done` of `total` things.  done: how many are done before it begins, which the rate leaves out."""

    def __init__(self, console: Console, *, total: int, text: str, done: int = 0) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._console, self._total, self._first = console, total, done
        self._progress: Progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(text, total=total, completed=done)
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, text: str) -> None:
        """Move the bar; text: the figures that stand before it."""
        done = min(done, self._total)
        self._progress.update(self._task, completed=done, description=text)
        now = time.monotonic()
        if self._console.is_terminal or now - self._said < EVERY:
            return
        self._said = now
        left = (self._total - done) * (now - self._began) / max(done - self._first, 1)
        self._console.print(f"{done} of {self._total}: {text}, {left / 60:.0f} min left")
