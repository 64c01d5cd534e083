"""Every outcome of a random procedure with its probability: coins and draws become branches.

It knows nothing of what is run: anything that takes its randomness from `sampling.flip` and `sampling.draw` can be
enumerated, the production code of a whole round included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

from paceline.ops import rejection, sampling

Result = TypeVar("Result")


class Branches:
    """Stands in for the generator: follows a script of choices, then always takes the first open branch."""

    def __init__(self) -> None:
        self.restart([])

    def restart(self, script: Sequence[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.widths: list[int] = []
        self.chance = 1.0

    def choose(self, chances: Sequence[float]) -> int:
        """One branching; only branches with a positive chance are open.  Returns the index of the one taken."""
        open_branches = [index for index, chance in enumerate(chances) if chance > 0.0]
        at = len(self.taken)
        pick = self.script[at] if at < len(self.script) else 0
        self.taken.append(pick)
        self.widths.append(len(open_branches))
        self.chance *= chances[open_branches[pick]]
        return open_branches[pick]

    def flip(self, probability: Tensor, *, generator: object) -> bool:
        chance = float(probability)
        assert 0.0 <= chance <= 1.0
        return self.choose([1.0 - chance, chance]) == 1

    def draw(self, probs: Tensor, *, generator: object) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._draw_row(row) for row in rows]).reshape(probs.shape[:-1])

    def _draw_row(self, weights: list[float]) -> int:
        assert min(weights) >= 0.0
        total = sum(weights)
        if total == 0.0:  # only draw_without_replacement asks, and it discards the answer
            return len(weights)
        return self.choose([weight / total for weight in weights])

    def next_script(self) -> list[int] | None:
        for at in reversed(range(len(self.taken))):
            if self.taken[at] + 1 < self.widths[at]:
                return [*self.taken[:at], self.taken[at] + 1]
        return None


def outcomes(run: Callable[[], Result], *, modules: Sequence[ModuleType] = ()) -> Iterator[tuple[Result, float]]:
    """Run a procedure once for each way its coins and draws can fall.

    modules: further modules that imported `flip` or `draw` by name.  Yields (result, probability); the latter sum to 1.
    """
    branches = Branches()
    script: list[int] | None = []
    with ExitStack() as stack:
        for module in (sampling, rejection, *modules):
            for name in ("flip", "draw"):
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, getattr(branches, name)))
        while script is not None:
            branches.restart(script)
            result = run()
            yield result, branches.chance
            script = branches.next_script()
