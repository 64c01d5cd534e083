"""How a sequential draft's levels become a tree: the best paths (`ranked`) or drawn ones (`sampled`).

A ranked tree is a deterministic function of the context, so it may be pruned by score.  A drawn child is never dropped
for what was drawn: that would change the emitted law.  This module knows the draft only as a function of levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoding.plan import ProposalPlan
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts._base import DraftOutput
from paceline.ops import tree
from paceline.ops.vocab import DraftVocab
from paceline.records import Tree


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes to run next.  tokens, parents: [B, n] int64 (parents index the level above).  hidden: [B, n, Hd]."""

    tokens: Tensor
    parents: Tensor
    hidden: Tensor
    depth: int


Expand = Callable[[Level], DraftOutput]
Pack = Callable[..., Tree]


def ranked_tree(
    roots: Sequence[int], root: DraftOutput, *, plan: ProposalPlan, depth: int, limits: Sequence[int], expand: Expand,
    vocab: DraftVocab, sampling: DraftSampling, dice: Sequence[RowDice], pack: Pack,
    keeps_laws: bool = False,
) -> Tree:  # fmt: skip
    """EAGLE-2's dynamic tree: expand the `width` best nodes of each level, keep the `nodes` best overall by log q."""
    batch, width = len(roots), plan.width
    pools = [_Pool(token) for token in roots]
    output, above = root, torch.zeros(batch, 1)
    beams = [[0] for _ in roots]  # pool index of each beam node
    for level in range(1, depth + 1):
        log_q = output.logits.float().log_softmax(dim=-1)
        if keeps_laws:
            _keep(pools, beams, log_q)
        best_of, ids = log_q.topk(min(width, log_q.shape[-1]), dim=-1)  # [B, m, k]
        tokens, values = vocab.to_target(ids).flatten(1).cpu(), best_of.cpu()  # sync
        scores = (values + above[:, :, None]).flatten(1)  # [B, m * k]
        best, picked = scores.topk(min(width, scores.shape[1]), dim=-1)
        kids = values.shape[-1]
        for row, (row_tokens, row_scores) in enumerate(zip(tokens.tolist(), scores.tolist(), strict=True)):
            first = pools[row].extend(beams[row], row_tokens, row_scores, kids, level)
            beams[row] = [first + index for index in picked[row].tolist()]
        if level == depth:
            break
        parents = picked // kids
        hidden = _rows(output.hidden, parents)
        output = expand(Level(tokens.gather(1, picked), parents, hidden, level))
        above = best
    parents, tokens, log_laws = _prune(pools, budget=plan.nodes, limits=limits)
    return pack(parents, tokens, log_laws=log_laws if keeps_laws else None)


def _rows(hidden: Tensor, index: Tensor) -> Tensor:
    """[B, m, Hd], [B, n] -> [B, n, Hd]."""
    return hidden.gather(1, index.to(hidden.device)[:, :, None].expand(-1, -1, hidden.shape[-1]))


def _keep(pools: list[_Pool], beams: list[list[int]], log_law: Tensor) -> None:
    """Remember what the draft said at the nodes of a level.  log_law: [B, m, W]."""
    for pool, beam, rows in zip(pools, beams, log_law.cpu(), strict=True):
        pool.log_laws.update(zip(beam, rows, strict=True))


def _prune(
    pools: list[_Pool], *, budget: int, limits: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[dict[int, Tensor]]]:
    parents: list[list[int]] = []
    tokens: list[list[int]] = []
    log_laws: list[dict[int, Tensor]] = []
    for pool, limit in zip(pools, limits, strict=True):
        shallow = [node for node, depth in enumerate(pool.depths) if depth <= limit]
        row_parents = tree.reindex(pool.parents, kept=shallow)
        row_tokens = [pool.tokens[node] for node in shallow]
        scores = [pool.scores[node] for node in shallow]
        kept = tree.best_nodes(row_parents, scores=scores, tokens=row_tokens, budget=budget + 1)
        parents.append(tree.reindex(row_parents, kept=kept))
        tokens.append([row_tokens[node] for node in kept])
        log_laws.append(_renumbered(pool.log_laws, [shallow[node] for node in kept]))
    return parents, tokens, log_laws


def _renumbered(laws: dict[int, Tensor], kept: Sequence[int]) -> dict[int, Tensor]:
    """The kept nodes' laws by their new numbers."""
    return {index: laws[node] for index, node in enumerate(kept) if node in laws}


class _Pool:
    """All candidate nodes of one row, root first.  log_laws: what the draft said at some of them, if that is kept."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.scores, self.depths = [root], [-1], [0.0], [0]
        self.log_laws: dict[int, Tensor] = {}

    def extend(self, beam: list[int], tokens: list[int], scores: list[float], kids: int, depth: int) -> int:
        first = len(self.tokens)
        self.tokens += tokens
        self.scores += scores
        self.parents += [beam[index // kids] for index in range(len(tokens))]
        self.depths += [depth] * len(tokens)
        return first


def sampled_tree(
    roots: Sequence[int], root: DraftOutput, *, plan: ProposalPlan, depth: int, limits: Sequence[int], expand: Expand,
    vocab: DraftVocab, sampling: DraftSampling, dice: Sequence[RowDice], pack: Pack,
    keeps_laws: bool = False,
) -> Tree:  # fmt: skip
    """Children drawn without replacement from the warped draft law; which node is expanded may depend on draws.

    Level 1 draws `width` children, each deeper level half as many per expanded node (at least one), for as many of the
    likeliest nodes as the budget still holds.
    """
    batch = len(roots)
    pools = [_Pool(token) for token in roots]
    laws: list[dict[int, Tensor]] = [{} for _ in roots]
    output, above, beams = root, torch.zeros(batch, 1), [[0] for _ in roots]
    draws, left = plan.width, plan.nodes
    for level in range(1, depth + 1):
        draws = min(draws, left)
        law = sampling.law(output.logits)  # [B, m, W]
        if keeps_laws:
            _keep(pools, beams, law.float().log())
        ids = torch.stack([dice[row].draw_children(law[row], count=draws) for row in range(batch)])  # [B, m, k]
        q = law.gather(2, ids.clamp_min(0)).masked_fill(ids < 0, 0.0).cpu()  # sync
        scores = (q.log() + above[:, :, None]).flatten(1)
        tokens = vocab.to_target(ids.clamp_min(0)).flatten(1).cpu()
        full = vocab.expand(law)  # [B, m, V]
        for row in range(batch):
            if level <= limits[row]:
                for place, node in enumerate(beams[row]):
                    laws[row][node] = full[row, place]
            first = pools[row].extend(beams[row], tokens[row].tolist(), scores[row].tolist(), draws, level)
            beams[row] = list(range(first, first + tokens.shape[1]))
        left -= tokens.shape[1]
        draws = max(1, draws // 2)
        count = min(plan.width, left // draws, tokens.shape[1])
        if level == depth or count < 1:
            break
        above, picked = scores.topk(count, dim=-1)
        beams = [[beams[row][index] for index in picked[row].tolist()] for row in range(batch)]
        parents = picked // ids.shape[2]
        hidden = _rows(output.hidden, parents)
        output = expand(Level(tokens.gather(1, picked), parents, hidden, level))
    return _pack_drawn(pools, laws, limits=limits, pack=pack, keeps_laws=keeps_laws)


def _pack_drawn(
    pools: list[_Pool], laws: list[dict[int, Tensor]], *, limits: Sequence[int], pack: Pack, keeps_laws: bool
) -> Tree:
    """Drop what lies deeper than a row's limit and the empty draws of a used-up support (log q = -inf)."""
    parents, tokens, kept_laws, log_laws = [], [], [], []
    for pool, row_laws, limit in zip(pools, laws, limits, strict=True):
        kept = [
            node
            for node, (depth, score) in enumerate(zip(pool.depths, pool.scores, strict=True))
            if depth <= limit and score != -torch.inf
        ]
        place = {node: index for index, node in enumerate(kept)}
        parents.append([place[pool.parents[node]] if node else -1 for node in kept])
        tokens.append([pool.tokens[node] for node in kept])
        kept_laws.append(_renumbered(row_laws, kept))
        log_laws.append(_renumbered(pool.log_laws, kept))
    return pack(parents, tokens, kept_laws, log_laws=log_laws if keeps_laws else None)
