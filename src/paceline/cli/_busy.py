"""One line of warning when other processes kept the cores busy while something was measured.

Two threads on one free core are slower than one: threads wait for each other in a loop, and the one that has no core
makes them all wait.  It knows clocks, not what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.machine import cores_of_others, cpu_times

if TYPE_CHECKING:
    from rich.console import Console

SHARE = 0.25  # of a core: less is the system's own


@contextmanager
def busy_warning(console: Console, *, threads: int) -> Generator[None, None, None]:
    """After the block, warn if fewer cores than `threads` were left free by others meanwhile."""
    before = cpu_times()
    yield
    after = cpu_times()
    if before is None or after is None:
        return
    taken, cores = cores_of_others(before, after), os.cpu_count() or 1
    if cores - taken < min(threads, cores) - SHARE:
        console.print(
            f"warning: other processes kept {taken:.1f} of {cores} cores busy meanwhile: times and speed-ups vary with "
            "them; measure again on an idle machine",
            style="yellow",
        )
