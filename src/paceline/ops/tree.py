"""The shape of a draft tree as an array of parents, and everything that follows from it.

Node 0 is the last committed token, a parent always stands before its children, and -1 means "no parent" (the root, or
a padding node). It knows neither laws nor caches: scores come in as numbers and indices go out.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor


def ancestors(parents: Tensor) -> Tensor:
    """Which node lies on the path of which: the tree's attention mask.

    parents: [B, N] int64.  Returns [B, N, N] bool; [b, i, j] is true when j is i or an ancestor of i.
    """
    size = parents.shape[1]
    node = torch.arange(size, device=parents.device)
    reach = (parents.unsqueeze(2) == node) | (node.unsqueeze(1) == node)  # one step up at most
    for _ in range((size - 1).bit_length()):  # each product doubles the number of steps
        reach = torch.matmul(reach.float(), reach.float()) > 0
    return reach


def depths(parents: Tensor) -> Tensor:
    """Number of edges to the root: parents [B, N] int64 -> [B, N] int64.  Padding nodes are at depth 0."""
    return ancestors(parents).sum(dim=-1) - 1


def chain(length: int) -> list[int]:
    """Parents of a chain of `length` drafted tokens behind the root: [-1, 0, 1, ...], length + 1 entries."""
    return list(range(-1, length))


def children(parents: Sequence[int]) -> list[list[int]]:
    """For each node the indices of its children, in index order.  parents: N entries.  Returns N lists."""
    below: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            below[parent].append(node)
    return below


def path(parents: Sequence[int], *, node: int) -> list[int]:
    """Node indices from the root down to `node`, both included."""
    steps = [node]
    while parents[steps[-1]] >= 0:
        steps.append(parents[steps[-1]])
    return steps[::-1]


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """The path to every node without children, in index order of the leaves."""
    return [path(parents, node=node) for node, below in enumerate(children(parents)) if not below]


def best_nodes(parents: Sequence[int], *, scores: Sequence[float], tokens: Sequence[int], budget: int) -> list[int]:
    """The `budget` best nodes by score, closed under parents, in the order of a new tree.

    parents, tokens: N entries; node 0 is the root and is always kept.  scores: N cumulative log q (a child never above
    its parent; if rounding puts it there it counts as equal).  budget: number of nodes kept, root included.
    Equal scores keep the shallower node, then the smaller token id, then the smaller index, so a child with log q = 0
    cannot displace its parent.  Returns indices into the input: level by level, siblings together and in the order of
    their parents, among siblings the higher score first, then the smaller token id.

    For ranked trees only: dropping nodes that were drawn, because of what was drawn, would change the emitted law.
    """
    depth = [0] * len(parents)
    score = list(scores)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depth[node] = depth[parent] + 1
            score[node] = min(score[node], score[parent])
    by_worth = sorted(range(1, len(parents)), key=lambda n: (-score[n], depth[n], tokens[n], n))
    kept = by_worth[: max(budget - 1, 0)]

    # One level at a time, so that a node's place among its level is known when its children are sorted.
    place = {0: 0}
    for level in range(1, max((depth[n] for n in kept), default=0) + 1):
        nodes = [n for n in kept if depth[n] == level]
        nodes.sort(key=lambda n: (place[parents[n]], -score[n], tokens[n], n))
        place.update({n: len(place) + offset for offset, n in enumerate(nodes)})
    return list(place)


def best_of_product(
    scores: Sequence[Sequence[float]], *, tokens: Sequence[Sequence[int]], root: int, budget: int
) -> tuple[list[int], list[int]]:
    """The `budget` best nodes of a tree in which all nodes of a level have the same children with the same log q.

    Exact without building that tree: a node is taken before its children, and a child before its next sibling.
    scores: per level the children's log q, highest first, all <= 0; tokens: their ids.  root: token of node 0.
    budget: number of nodes kept, root included.  Equal scores keep the shallower node, then the smaller token id.
    Returns (parents, tokens), parents before children, siblings best first.  For ranked trees only.
    """
    parents, ids, worth = [-1], [root], [0.0]
    open_nodes: list[tuple[float, int, int, int, int]] = []  # (-score, depth, token, parent, rank among siblings)

    def offer(parent: int, depth: int, rank: int) -> None:
        if depth <= len(scores) and rank < len(scores[depth - 1]) and scores[depth - 1][rank] > -float("inf"):
            score = worth[parent] + scores[depth - 1][rank]
            heapq.heappush(open_nodes, (-score, depth, tokens[depth - 1][rank], parent, rank))

    offer(0, 1, 0)
    while open_nodes and len(parents) < budget:
        loss, depth, token, parent, rank = heapq.heappop(open_nodes)
        parents.append(parent)
        ids.append(token)
        worth.append(-loss)
        offer(len(parents) - 1, depth + 1, 0)
        offer(parent, depth, rank + 1)
    return parents, ids


def reindex(parents: Sequence[int], *, kept: Sequence[int]) -> list[int]:
    """Parents of the kept nodes in their new numbering.  kept: indices closed under parents, parents first."""
    place = {node: index for index, node in enumerate(kept)}
    return [place[parents[node]] if parents[node] >= 0 else -1 for node in kept]


def stack(rows: Sequence[Sequence[int]], *, fill: int, size: int | None = None) -> Tensor:
    """Rows of unequal length as one [B, N] int64 tensor, padded on the right.

    fill: 0 for tokens; -1 for parents, which makes a padding node see and be seen by no other.
    size: N; None takes the longest row, a larger one rounds up to a prepared shape.
    """
    longest = max(len(row) for row in rows)
    width = longest if size is None else size
    assert width >= longest, f"a row has {longest} nodes, more than {width}"
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)


def front_index(paths: Sequence[Sequence[int]], *, size: int) -> Tensor:
    """For each row the order of nodes that puts its path first, for gathering cached rows after a verdict.

    paths: B lists of node indices, root first.  size: N.
    Returns [B, N] int64, each row a permutation: the path in order, then the other nodes in theirs.
    """
    order: list[list[int]] = []
    for row in paths:
        on_path = set(row)
        order.append([*row, *(node for node in range(size) if node not in on_path)])
    return torch.tensor(order, dtype=torch.int64)
