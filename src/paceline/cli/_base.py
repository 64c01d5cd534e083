"""What a command is: a function that typer can read, and the group under which `paceline --help` shows it.

It knows no command; a command file ends with `PLUGIN = Command(run=..., group="Use", order=10)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Group = Literal["Start here", "Data", "Train", "Use", "Measure"]
MAX_SEED = 2**32  # what every generator takes, with room for the number of a row on top
GROUPS: tuple[str, ...] = get_args(Group)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line; the name of its file is the name of the command.

    run: a function with typer annotations, whose docstring is the help text; it imports heavy things itself.
    order: place within the group, lowest first.
    """

    run: Callable[..., None]
    group: Group
    order: int = 50

    @property
    def place(self) -> tuple[int, int]:
        """Where the help page shows the command."""
        return GROUPS.index(self.group), self.order
