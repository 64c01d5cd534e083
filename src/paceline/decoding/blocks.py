"""The proposer of a block draft: one pass behind the root says the laws of all its slots, and they become a tree.

The draft's cache holds the keys and values that the committed positions' features give; a block's own lie behind them
as scratch and are never committed.  A slot's law does not depend on what was drawn before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.decoding.grow import Level, sampled_tree
from paceline.decoding.level import ROUND
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import Proposer, Rows, pack_trees
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts._base import BlockDraft, DraftOutput
from paceline.drafts._layers import mix
from paceline.errors import ConfigError
from paceline.ops import masks, tree
from paceline.records import Tree
from paceline.targets.generic import Target


class BlockProposer(Proposer):
    """Trees from a block draft: the best paths of the product of its slots' laws, or drawn ones.

    Raises ConfigError for a plan that is deeper than the block.
    """

    def __init__(self, draft: BlockDraft, target: Target, plan: ProposalPlan, sampling: DraftSampling) -> None:
        if plan.depth > draft.block_size - 1:
            raise ConfigError(
                f"proposal: depth is {plan.depth}; the draft's block of {draft.block_size} says {draft.block_size - 1} "
                "tokens: lower the depth, or train a draft with a larger block"
            )
        self.draft, self.target, self.plan, self.sampling = draft, target, plan, sampling
        self.taps = draft.taps
        self.cache = KVCache(0, capacity=0)
        self._dtype = draft.head_weight.dtype

    def begin(self, batch: int, *, capacity: int) -> None:
        """An empty draft cache with room for a block."""
        self.cache = KVCache(batch, capacity=capacity + self.draft.block_size)

    @torch.no_grad()
    def observe(self, tokens: Rows, *, context: Rows, taps: Tensor | None) -> None:
        """Keep the keys and values of the new positions' features."""
        assert taps is not None, "a block draft reads the target's taps"
        counts = [len(row) for row in tokens]
        count, device = max(counts), taps.device
        self.cache.ensure(max(self.cache.lengths) + count + self.draft.block_size)
        places = self._place(count)
        features = self.draft.fuse(taps[:, :count].to(self._dtype))
        pairs = self.draft.context(features, positions=places.to(device))
        for layer, (keys, values) in enumerate(pairs):
            self.cache.write(layer, keys=keys, values=values)
        self.cache.commit([range(count) for count in counts])

    @torch.no_grad()
    def propose(self, roots: Sequence[int], *, limits: Sequence[int], dice: Sequence[RowDice]) -> Tree:
        """One block pass, then a tree to the plan's depth, or to the deepest row's limit."""
        depth = min(self.plan.depth, max(limits))
        if depth < 1:
            return pack_trees([[-1] for _ in roots], [[root] for root in roots])
        logits = self.say(roots)[:, :depth]
        if self.plan.law == "ranked":
            return self._ranked(roots, logits, limits=limits)
        # Nothing is handed on from node to node, so a node's features are one zero.
        features = logits.new_zeros(len(roots), max(self.plan.width, self.plan.nodes), 1)

        def expand(level: Level) -> DraftOutput:
            count = level.tokens.shape[1]
            return DraftOutput(logits[:, level.depth, None].expand(-1, count, -1), features[:, :count])

        return sampled_tree(
            roots, DraftOutput(logits[:, :1], features[:, :1]), plan=self.plan, depth=depth, limits=limits,
            expand=expand, vocab=self.draft.vocab, sampling=self.sampling, dice=dice, pack=pack_trees,
            keeps_laws=self.keeps_laws,
        )  # fmt: skip

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop cache rows."""
        self.cache.keep_rows(rows)

    @torch.no_grad()
    def say(self, roots: Sequence[int]) -> Tensor:
        """Logits [B, block_size - 1, W] of the tokens behind each row's root.

        The block is always whole: its slots see each other, so a shorter one would say something else.
        """
        batch, size, device = len(roots), self.draft.block_size, self.target.device
        ids = torch.full((batch, size), self.draft.mask_token_id, dtype=torch.int64)
        ids[:, 0] = torch.tensor(list(roots))
        self.cache.ensure(max(self.cache.lengths) + size)
        places = self._place(size)
        whole = torch.ones(batch, size, size, dtype=torch.bool)
        known = masks.prefix_slots(torch.tensor(self.cache.lengths), capacity=self.cache.view)
        visible = masks.prefix_tree_mask(known, tree_mask=whole, tree_slots=places, tree_positions=places).to(device)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return mix(queries, *self.cache.write(layer, keys=keys, values=values), mask=visible)

        embeds = self.target.embed(ids.to(device)).to(self._dtype)
        hidden = self.draft.block(embeds, positions=places.to(device), attend=attend)
        return self.draft.logits(hidden[:, 1:])

    def _ranked(self, roots: Sequence[int], logits: Tensor, *, limits: Sequence[int]) -> Tree:
        log_q = logits.float().log_softmax(dim=-1)
        best, ids = log_q.topk(min(self.plan.width, log_q.shape[-1]), dim=-1)  # [B, D, k]
        tokens, scores = self.draft.vocab.to_target(ids).tolist(), best.tolist()  # sync
        rows = [
            tree.best_of_product(scores[row][:limit], tokens=tokens[row][:limit], root=root, budget=self.plan.nodes + 1)
            for row, (root, limit) in enumerate(zip(roots, limits, strict=True))
        ]
        parents = [row for row, _ in rows]
        laws = [_laws(row, log_q[place]) for place, row in enumerate(parents)] if self.keeps_laws else None
        return pack_trees(parents, [ids for _, ids in rows], log_laws=laws)

    def _place(self, count: int) -> Tensor:
        """The next `count` slots of every row, told to the cache: [B, count] int64, which are their positions too."""
        lengths = self.cache.lengths
        places = torch.tensor(lengths)[:, None] + torch.arange(count)
        view = min(self.cache.capacity, -(-(max(lengths) + count) // ROUND) * ROUND)
        same = min(lengths) == max(lengths)
        self.cache.place(places.to(self.target.device), view=view, start=lengths[0] if same else None)
        return places


def _laws(parents: Sequence[int], log_q: Tensor) -> dict[int, Tensor]:
    """The slot's law for every node that it could have grown: log_q [D, W] float32 -> {node: [W]}."""
    depths = [len(tree.path(parents, node=node)) - 1 for node in range(len(parents))]
    return {node: log_q[depth] for node, depth in enumerate(depths) if depth < len(log_q)}
