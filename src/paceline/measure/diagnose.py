"""Rounds as diagnosis sees them, and what is counted of them (methods.md, VSD's diagnostics).

The draft's *greedy path* is its likeliest token at every step, to the depth that the round allows.  It is *pruned* when
the verified tree does not hold it whole.  A round *coincides* when its accepted path is a beginning of the greedy path.
Everything is read from a proposal that carries its laws and from the verdict on it; nothing here decodes, and counts
are plain sums, so that prompts can be pooled and resampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.decoding.plan import ProposalPlan
from paceline.errors import UnsupportedOption
from paceline.ops.vocab import DraftVocab
from paceline.records import Tree, Verdict

BINS = 10  # of a probability, equally wide
ENTROPY_STEP = 0.25  # nats, width of a bin
ENTROPY_BINS = 28  # the last one holds everything above
RANKS = (1, 2, 3, 4, 5, 9, 17, 33, 65, 129)  # first rank of each class; the last one is open
Reason = Literal["depth", "vocabulary", "pruned", "width", "unread"]
REASONS: tuple[Reason, ...] = ("depth", "vocabulary", "pruned", "width", "unread")
KINDS = ("token", "path")  # what a confidence is of
PLACES = ("accepted", "missed", "behind")  # where a law stands; see `_entropy`
Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Miss:
    """Where the target's own path left the proposal.

    reason: `depth` the proposal ended there; `vocabulary` the draft cannot say the token; `pruned` the token was among
    the `width` likeliest and was not verified; `width` it came behind them; `unread` the node was verified, but the
    draft was not run at it.  rank: of the target's token in the draft's law, 1 the likeliest, where there is one.
    """

    reason: Reason
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one row; node 0 is the root.

    depth: longest path that it could have accepted, at least 1.  parents: [N].  log_q: [N], of each node's own token,
    0 at the root.  entropies: node -> nats of the draft's law behind it, where the draft was run.  greedy: verified
    nodes of the draft's greedy path, path: accepted nodes, both without the root.  miss: None when the row ended on the
    draft's own token, so that nothing was asked behind it.
    """

    depth: int
    parents: Sequence[int]
    log_q: Sequence[float]
    entropies: Mapping[int, float]
    greedy: Sequence[int]
    path: Sequence[int]
    miss: Miss | None

    @property
    def end(self) -> int:
        """The last accepted node, or the root."""
        return self.path[-1] if self.path else 0

    def children(self, node: int) -> list[int]:
        """Verified children of a node."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


class Reader:
    """Reads rounds of one draft under one plan."""

    def __init__(self, vocab: DraftVocab, plan: ProposalPlan) -> None:
        self._plan = plan
        self._words: list[int] = vocab.to_draft(torch.arange(vocab.target_size, device=vocab.d2t.device)).tolist()

    def read(self, proposal: Tree, row: int, verdict: Verdict, *, limit: int) -> Round | None:
        """The round of a row whose paths could have `limit` tokens; None where nothing could be drafted.

        Raises UnsupportedOption when the proposal carries no laws.
        """
        depth = min(self._plan.depth, limit)
        if depth < 1:
            return None
        if proposal.log_laws is None:
            raise UnsupportedOption("this draft does not tell its laws, so there is nothing to diagnose")
        count, laws = proposal.counts[row], proposal.log_laws[row]
        tokens, parents = proposal.tokens[row, :count].tolist(), proposal.parents[row, :count].tolist()
        log_q = [0.0, *(self._log_q(laws[parents[node]], tokens[node]) for node in range(1, count))]
        children = proposal.children[row]
        return Round(
            depth=depth,
            parents=parents,
            log_q=log_q,
            entropies={node: _nats(law) for node, law in laws.items()},
            greedy=_greedy_nodes(children, log_q, laws),
            path=_accepted_nodes(verdict, tokens, children),
            miss=self._miss(verdict, laws, depth),
        )

    def _log_q(self, law: Tensor, token: int) -> float:
        return float(law[self._words[token]])

    def _miss(self, verdict: Verdict, laws: Mapping[int, Tensor], depth: int) -> Miss | None:
        if _is_ended_by_draft(verdict):
            return None
        token, end = verdict.tokens[-1], verdict.path[-1]
        word = self._words[token] if token < len(self._words) else -1  # a target's padded vocabulary may be longer
        if verdict.accepted == depth:
            return Miss("depth")
        if word < 0:
            return Miss("vocabulary")
        if end not in laws:
            return Miss("unread")
        rank = 1 + int((laws[end] > laws[end][word]).sum())
        return Miss("pruned" if rank <= self._plan.width else "width", rank)


def _nats(law: Tensor) -> float:
    """Entropy of a law given by its logarithms, [W]."""
    return float(torch.special.entr(law.double().exp()).sum())


def _is_ended_by_draft(verdict: Verdict) -> bool:
    return len(verdict.tokens) == verdict.accepted


def _accepted_nodes(verdict: Verdict, tokens: Sequence[int], children: Sequence[Sequence[int]]) -> list[int]:
    """The accepted path without the root; a verdict leaves out the node that ends a row, since no cache row is kept."""
    last = [child for child in children[verdict.path[-1]] if tokens[child] == verdict.tokens[-1]]
    return [*verdict.path[1:], *(last if _is_ended_by_draft(verdict) else ())]


def _greedy_nodes(children: Sequence[Sequence[int]], log_q: Sequence[float], laws: Mapping[int, Tensor]) -> list[int]:
    """The greedy path as far as it was verified; of equally likely tokens the first that was verified counts."""
    nodes: list[int] = []
    here = 0
    while here in laws:
        best = float(laws[here].max())
        likeliest = [child for child in children[here] if log_q[child] >= best]
        if not likeliest:
            break
        here = likeliest[0]
        nodes.append(here)
    return nodes


def count(rounds: Iterable[Round]) -> dict[str, float]:
    """Sums over rounds, every name of `NAMES`.

    greedy_rounds, greedy_pruned, greedy_kept (share of the path's nodes), accepting (rounds that accept something),
    coinciding (those among them that coincide), whole (that accept the greedy path to its end); ended (on the draft's
    own token), miss_REASON, rank_i; for each kind of confidence and bin KIND_i_n, KIND_i_q (sum), KIND_i_accepted;
    nats_PLACE_n, nats_PLACE_sum, and nats_accepted_i, nats_rejected_i by bin.
    """
    counts = dict.fromkeys(NAMES, 0.0)
    for each in rounds:
        _count_greedy(each, counts)
        _count_miss(each.miss, counts)
        _count_confidence(each, counts)
        _count_entropy(each, counts)
    return counts


def _count_greedy(each: Round, counts: dict[str, float]) -> None:
    is_along = list(each.path) == list(each.greedy[: len(each.path)])
    counts["greedy_rounds"] += 1
    counts["greedy_pruned"] += len(each.greedy) < each.depth
    counts["greedy_kept"] += len(each.greedy) / each.depth
    counts["accepting"] += bool(each.path)
    counts["coinciding"] += is_along and bool(each.path)
    counts["whole"] += is_along and len(each.path) == each.depth


def _count_miss(miss: Miss | None, counts: dict[str, float]) -> None:
    if miss is None:
        counts["ended"] += 1
        return
    counts[f"miss_{miss.reason}"] += 1
    if miss.rank is not None:
        counts[f"rank_{sum(miss.rank >= first for first in RANKS) - 1}"] += 1


def _count_confidence(each: Round, counts: dict[str, float]) -> None:
    """A token is judged where its parent was accepted, a path always; neither behind the end of a row."""
    accepted = {0, *each.path}
    log_path = [0.0]
    for node in range(1, len(each.parents)):
        parent = each.parents[node]
        log_path.append(log_path[parent] + each.log_q[node])
        if _is_unjudged(each, parent):
            continue
        is_accepted = node in accepted
        if parent in accepted:
            _add(counts, "token", each.log_q[node], is_accepted)
        _add(counts, "path", log_path[node], is_accepted)


def _add(counts: dict[str, float], kind: str, log_q: float, is_accepted: bool) -> None:
    q = min(math.exp(log_q), 1.0)
    name = f"{kind}_{min(int(q * BINS), BINS - 1)}"
    counts[f"{name}_n"] += 1
    counts[f"{name}_q"] += q
    counts[f"{name}_accepted"] += is_accepted


def _count_entropy(each: Round, counts: dict[str, float]) -> None:
    """One entropy for each law that put nodes into the tree.

    accepted: the target followed one of them; missed: it came there and followed none; behind: the law stands behind a
    rejected token.  The last two are what `rejected` means.
    """
    accepted = set(each.path)
    for node, nats in each.entropies.items():
        children = each.children(node)
        if not children or _is_unjudged(each, node):
            continue
        place = "behind" if node and node not in accepted else "missed"
        if accepted.intersection(children):
            place = "accepted"
        counts[f"nats_{place}_n"] += 1
        counts[f"nats_{place}_sum"] += nats
        side = "accepted" if place == "accepted" else "rejected"
        counts[f"nats_{side}_{min(int(nats / ENTROPY_STEP), ENTROPY_BINS - 1)}"] += 1


def _is_unjudged(each: Round, node: int) -> bool:
    """Whether a node stands at or behind the end of a row that the draft's own token ended."""
    if each.miss is not None:
        return False
    while node > each.end:  # parents come first
        node = each.parents[node]
    return node == each.end


NAMES = (
    *("greedy_rounds", "greedy_pruned", "greedy_kept", "accepting", "coinciding", "whole", "ended"),
    *(f"miss_{reason}" for reason in REASONS),
    *(f"rank_{place}" for place in range(len(RANKS))),
    *(f"{kind}_{place}_{what}" for kind in KINDS for place in range(BINS) for what in ("n", "q", "accepted")),
    *(f"nats_{place}_{what}" for place in PLACES for what in ("n", "sum")),
    *(f"nats_{side}_{place}" for side in ("accepted", "rejected") for place in range(ENTROPY_BINS)),
)
