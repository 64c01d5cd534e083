"""Walk one row's tree with the target's scores: which path is committed, and the target's own token at its end.

Greedy is the limit of the sampling rule (docs/papers.md); the shortcut by argmax is tested against the rule on one-hot
laws.  Processors see the real ids of the path, one call per committed token, exactly as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoding.sampling import RowDice
from paceline.errors import TargetError
from paceline.ops.rejection import verify_children
from paceline.records import Tree, Verdict

Process = Callable[[list[int], Tensor], Tensor]
Stop = Callable[[list[int]], bool]


@dataclass(slots=True)
class Recorder:
    """Raw logits and processed scores, [V] float32 each, of the committed tokens of a row."""

    logits: list[Tensor]
    scores: list[Tensor]

    def add(self, logits: Tensor, scores: Tensor) -> None:
        """Keep one token's."""
        self.logits.append(logits.to(torch.float32, copy=True))
        self.scores.append(scores.to(torch.float32, copy=True))


def walk(
    proposal: Tree,
    row: int,
    logits: Tensor,
    *,
    ids: list[int],
    process: Process | None,
    is_stop: Stop,
    dice: RowDice | None,
    record: Recorder | None = None,
) -> Verdict:
    """Verify row `row` of a proposal.

    logits: [N, V] raw target logits of the row's nodes.  ids: all ids of the row with the root last; grows by the
    committed tokens.  process: (ids, logits [V]) -> processed scores [V], or None.  is_stop: whether the row ends with
    these ids.  dice: None for greedy.  record: keeps the scores of each committed token.
    """
    node, path, tokens = 0, [0], []
    while True:
        scores = logits[node] if process is None else process(ids, logits[node])
        if record is not None:
            record.add(logits[node], scores)
        if dice is None:  # an argmax over the vocabulary for the nodes of the path only, not for the whole tree
            token = int(scores.argmax())  # sync
            if scores[token].isnan():  # torch puts a NaN above every number
                raise _no_numbers(len(ids))
            child, token = _follow(proposal, row, node, token)
        else:
            child, token = _draw(proposal, row, node, scores, dice, ids)
        ids.append(token)
        tokens.append(token)
        stopped = is_stop(ids)
        if child is None or stopped:
            return Verdict(path, tokens, len(tokens) - (child is None), stopped)
        path.append(child)
        node = child


def _follow(proposal: Tree, row: int, node: int, token: int) -> tuple[int | None, int]:
    for child in proposal.children[row][node]:
        if int(proposal.tokens[row, child]) == token:
            return child, token
    return None, token


def _draw(proposal: Tree, row: int, node: int, scores: Tensor, dice: RowDice, ids: list[int]) -> tuple[int | None, int]:
    law = torch.softmax(scores.double(), dim=-1)
    children = proposal.children[row][node]
    tokens = [int(proposal.tokens[row, child]) for child in children]
    q = proposal.draft_law[row].get(node) if proposal.draft_law is not None else None
    if q is not None and len(q) < len(law):  # the target's vocabulary is padded; the draft gives padding no mass
        q = torch.nn.functional.pad(q, (0, len(law) - len(q)))
    index, token = verify_children(law, children=tokens, q=q, generator=dice.verify)
    if index is not None:
        return children[index], tokens[index]
    assert token is not None
    if token >= len(law):  # nothing can be drawn from NaN
        raise _no_numbers(len(ids))
    return None, token


def _no_numbers(place: int) -> TargetError:
    return TargetError(f"scores of token {place} are not numbers; check the target's dtype and the processors")
