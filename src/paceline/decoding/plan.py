"""What to propose in a round: shape, law and budget of the tree, as one frozen record.

It knows no draft: the same plan drives a chain of five or a tree of sixty, ranked or sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError

MOST_NODES = 4096  # far beyond what pays, and still a mask of some MB


@dataclass(frozen=True, slots=True)
class ProposalPlan:
    """How a proposal grows.

    depth: longest path, in drafted tokens.  width: children tried per node and nodes expanded per level (1 = a chain).
    nodes: most drafted nodes that are verified.  law: `ranked` children are the draft's best, `sampled` ones are drawn.
    """

    depth: int = 5
    width: int = 1
    nodes: int = 5
    law: Literal["ranked", "sampled"] = "ranked"

    def __post_init__(self) -> None:
        sizes: dict[str, object] = {"depth": self.depth, "width": self.width, "nodes": self.nodes}
        for name, size in sizes.items():
            if not isinstance(size, int):
                raise ConfigError(f"proposal: {name} is {size!r}; expected a whole number")
        if self.depth < 1 or self.width < 1 or self.nodes < 1:
            raise ConfigError(
                f"proposal: depth, width and nodes must be at least 1, found {self.depth}, {self.width}, {self.nodes}"
            )
        if max(self.nodes, self.depth * self.width) > MOST_NODES:
            raise ConfigError(
                f"proposal: {self.nodes} nodes, {self.depth} levels of {self.width}; expected at most {MOST_NODES} "
                "nodes"
            )
        if self.law not in ("ranked", "sampled"):
            raise ConfigError(f"proposal law is {self.law!r}; expected 'ranked' or 'sampled'")

    @classmethod
    def chain(cls, length: int, *, law: Literal["ranked", "sampled"] = "ranked") -> ProposalPlan:
        """A chain of `length` drafted tokens."""
        return cls(depth=length, width=1, nodes=length, law=law)

    @property
    def scratch(self) -> int:
        """Cache slots that growing and verifying a proposal may need behind the committed tokens, root included."""
        return 1 + max(self.nodes, self.depth * self.width)

    def __str__(self) -> str:
        shape = f"chain of {self.depth}" if self.width == 1 else f"tree {self.depth}x{self.width}, {self.nodes} nodes"
        return f"{shape}, {self.law}"
