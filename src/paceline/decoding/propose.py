"""Proposers: who keeps a draft's state through a generation and turns it into a tree each round.

A proposer knows the draft and the target's embeddings; it never verifies.  `observe` is the one place where committed
tokens meet the target's features: the pair (features at t, token t + 1) sits at draft position t, in training too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.decoding.grow import Level, ranked_tree, sampled_tree
from paceline.decoding.level import choose_level
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts._base import DraftOutput, LookupDraft, SequentialDraft
from paceline.ops import tree
from paceline.records import Tree
from paceline.targets.generic import Target

Rows = Sequence[Sequence[int]]


class Proposer(ABC):
    """One generation's drafting state for B rows.

    taps: the target layers it wants to read (empty for none).
    keeps_laws: whether its trees carry the draft's laws, which diagnosis reads and decoding does not.
    """

    taps: tuple[int, ...] = ()
    keeps_laws: bool = False

    @abstractmethod
    def begin(self, batch: int, *, capacity: int) -> None:
        """Forget everything; `batch` rows of up to `capacity` committed tokens follow."""

    @abstractmethod
    def observe(self, tokens: Rows, *, context: Rows, taps: Tensor | None) -> None:
        """Committed tokens that follow the positions whose features are given.

        tokens: per row the n_b tokens x[t+1] for the n_b new positions t.  taps: [B, n, K*H], padded on the right.
        context: per row all ids so far.
        """

    @abstractmethod
    def propose(self, roots: Sequence[int], *, limits: Sequence[int], dice: Sequence[RowDice]) -> Tree:
        """A tree per row behind its root token; no path longer than limits[b] (0 = the root alone)."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop every row but these; `observe` follows before the next proposal."""


def pack_trees(
    parents: list[list[int]],
    tokens: list[list[int]],
    laws: list[dict[int, Tensor]] | None = None,
    order: list[list[list[int]]] | None = None,
    log_laws: list[dict[int, Tensor]] | None = None,
) -> Tree:
    """Rows of nodes as one padded Tree.  order: children of each node as they are tried (default: index order)."""
    stacked = tree.stack(parents, fill=-1)
    mask = tree.ancestors(stacked)
    return Tree(
        tokens=tree.stack(tokens, fill=0),
        parents=stacked,
        depths=mask.sum(dim=-1) - 1,
        mask=mask,
        counts=[len(row) for row in parents],
        children=order or [tree.children(row) for row in parents],
        draft_law=laws,
        log_laws=log_laws,
    )


class NoDraft(Proposer):
    """Plain decoding: the root alone."""

    def begin(self, batch: int, *, capacity: int) -> None:
        """Nothing to keep."""

    def observe(self, tokens: Rows, *, context: Rows, taps: Tensor | None) -> None:
        """Nothing to learn."""

    def propose(self, roots: Sequence[int], *, limits: Sequence[int], dice: Sequence[RowDice]) -> Tree:
        """Trees of one node."""
        batch = len(roots)
        one = torch.ones(batch, 1, 1, dtype=torch.bool)
        zero = torch.zeros(batch, 1, dtype=torch.int64)
        tokens = torch.tensor(list(roots)).unsqueeze(1)
        return Tree(tokens, zero - 1, zero, one, [1] * batch, [[[]]] * batch)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""


class LookupProposer(Proposer):
    """A draft without weights: its candidate continuations merged into one tree."""

    def __init__(self, draft: LookupDraft, plan: ProposalPlan) -> None:
        self.draft, self.plan = draft, plan
        self._context: list[list[int]] = []

    def begin(self, batch: int, *, capacity: int) -> None:
        """Empty contexts."""
        self._context = [[] for _ in range(batch)]

    def observe(self, tokens: Rows, *, context: Rows, taps: Tensor | None) -> None:
        """Remember all ids of each row."""
        self._context = [list(ids) for ids in context]

    def propose(self, roots: Sequence[int], *, limits: Sequence[int], dice: Sequence[RowDice]) -> Tree:
        """Candidates share their common beginnings; children are tried in the order of the candidates."""
        parents: list[list[int]] = []
        tokens: list[list[int]] = []
        for row, root in enumerate(roots):
            row_parents, row_tokens = [-1], [root]
            length = min(self.plan.depth, limits[row])
            candidates = (
                self.draft.continuations(self._context[row], length=length, count=self.plan.width) if length else []
            )
            for candidate in candidates:
                self._insert(row_parents, row_tokens, candidate[:length])
            parents.append(row_parents)
            tokens.append(row_tokens)
        return pack_trees(parents, tokens)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop contexts."""
        self._context = [self._context[row] for row in rows]

    def _insert(self, parents: list[int], tokens: list[int], candidate: Sequence[int]) -> None:
        node = 0
        for token in candidate:
            known = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == token]
            if known:
                node = known[0]
                continue
            if len(parents) > self.plan.nodes:
                return
            parents.append(node)
            tokens.append(token)
            node = len(parents) - 1


class SequentialProposer(Proposer):
    """A sequential draft: its own cache over committed positions, grown by one tree level per call."""

    def __init__(self, draft: SequentialDraft, target: Target, plan: ProposalPlan, sampling: DraftSampling) -> None:
        self.draft, self.plan, self.sampling = draft, plan, sampling
        self.taps = draft.taps
        self.cache = KVCache(0, capacity=0)
        self._run, self._dtype = choose_level(draft, target), draft.head_weight.dtype
        self._root = DraftOutput(torch.empty(0), torch.empty(0))
        self._seen = torch.empty(0)  # [B, n, above] bool, of the level above

    def begin(self, batch: int, *, capacity: int) -> None:
        """An empty draft cache with room for the scratch nodes of a proposal."""
        self.cache = KVCache(batch, capacity=capacity + self.plan.scratch)

    @torch.no_grad()
    def observe(self, tokens: Rows, *, context: Rows, taps: Tensor | None) -> None:
        """Run the draft over the new pairs (features at t, token t + 1); keep what it says at each row's last one."""
        assert taps is not None, "a sequential draft reads the target's taps"
        counts = [len(row) for row in tokens]
        ids = tree.stack(tokens, fill=0)
        batch, count = ids.shape
        self.cache.ensure(max(self.cache.lengths) + count + self.plan.scratch)
        causal = torch.ones(count, count, dtype=torch.bool).tril().expand(batch, -1, -1)
        features = self.draft.fuse(taps[:, :count].to(self._dtype))
        last = torch.arange(batch) * count + torch.tensor(counts) - 1
        self._root = self._run(
            self.cache, ids, features, depths=torch.arange(count).expand(batch, -1),
            seen=causal, above=0, wanted=last[:, None],
        )  # fmt: skip
        self.cache.commit([range(count) for count in counts])

    @torch.no_grad()
    def propose(self, roots: Sequence[int], *, limits: Sequence[int], dice: Sequence[RowDice]) -> Tree:
        """Grow level by level to the plan's depth, or to the deepest row's limit."""
        depth = min(self.plan.depth, max(limits))
        if depth < 1:
            return pack_trees([[-1] for _ in roots], [[root] for root in roots])
        self._seen = torch.zeros(len(roots), 1, 0, dtype=torch.bool)
        grow = sampled_tree if self.plan.law == "sampled" else ranked_tree
        return grow(
            roots, self._root, plan=self.plan, depth=depth, limits=limits, expand=self._expand,
            vocab=self.draft.vocab, sampling=self.sampling, dice=dice, pack=pack_trees,
            keeps_laws=self.keeps_laws,
        )  # fmt: skip

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop cache rows; what was said at their ends is said anew by the `observe` that follows."""
        self.cache.keep_rows(rows)

    def _expand(self, level: Level) -> DraftOutput:
        """Run one tree level; a node sees what its parent saw, and itself."""
        batch, count = level.tokens.shape
        above = self._seen.shape[-1]
        index = level.parents[:, :, None].expand(-1, -1, above)
        itself = torch.eye(count, dtype=torch.bool).expand(batch, -1, -1)
        self._seen = torch.cat([self._seen.gather(1, index), itself], dim=-1)
        return self._run(
            self.cache, level.tokens, level.hidden, depths=torch.full((batch, count), level.depth - 1),
            seen=self._seen, above=above, wanted=torch.arange(batch * count).view(batch, count),
        )  # fmt: skip
