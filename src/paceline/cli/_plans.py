"""How a proposal plan is spelled on the command line: `chain:5`, `tree:6x4:24`, with `:sampled` behind it if drawn.

It knows the spelling alone; what a plan means is `decoding.plan`.
"""

import re
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.decoding.plan import ProposalPlan

SPELLING = "chain:LENGTH or tree:DEPTHxWIDTH:NODES, with :sampled behind it to draw the tokens"
_CHAIN = re.compile(r"chain:(\d+)(?::(ranked|sampled))?")
_TREE = re.compile(r"tree:(\d+)x(\d+):(\d+)(?::(ranked|sampled))?")


def parse_plan(text: str, *, option: str = "--plan") -> "ProposalPlan":
    """The plan of a spelling.  option: how errors name where it stands.  Raises ConfigError."""
    from paceline.decoding.plan import ProposalPlan

    if found := _CHAIN.fullmatch(text):
        return ProposalPlan.chain(int(found[1]), law="sampled" if found[2] == "sampled" else "ranked")
    if found := _TREE.fullmatch(text):
        law = "sampled" if found[4] == "sampled" else "ranked"
        return ProposalPlan(depth=int(found[1]), width=int(found[2]), nodes=int(found[3]), law=law)
    raise ConfigError(f"{option}: found '{text}', expected {SPELLING}")


def file_part(text: str) -> str:
    """A spelling as a part of a file name: `tree:6x4:24` -> `tree-6x4-24`."""
    return text.replace(":", "-")
