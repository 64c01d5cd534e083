"""Growing trees from a draft that is a table: budgets, ties, limits by row, and what is never dropped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.decoding.grow import Level, ranked_tree, sampled_tree
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import pack_trees
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts._base import DraftOutput
from paceline.errors import ConfigError
from paceline.ops.vocab import DraftVocab
from paceline.records import Tree

VOCAB = 8


class TableDraft:
    """Logits after a token are a row of a table; `hidden` carries the token, so that a wrong gather shows."""

    def __init__(self, table: Tensor, vocab: DraftVocab) -> None:
        self.table, self.vocab = table, vocab
        self.levels: list[Level] = []

    def root(self, tokens: Sequence[int]) -> DraftOutput:
        ids = torch.tensor(list(tokens))[:, None]
        return DraftOutput(self.table[ids], ids[:, :, None].float())

    def expand(self, level: Level) -> DraftOutput:
        self.levels.append(level)
        return DraftOutput(self.table[level.tokens], level.tokens[:, :, None].float())

    def grow(
        self, plan: ProposalPlan, roots: Sequence[int], *, limits: Sequence[int], seeds: Sequence[int] = (),
        keeps_laws: bool = False,
    ) -> Tree:  # fmt: skip
        dice = [RowDice(seed) for seed in seeds or range(len(roots))]
        for die in dice:
            die.begin_round(4)
        return (sampled_tree if plan.law == "sampled" else ranked_tree)(
            roots, self.root(roots), plan=plan, depth=min(plan.depth, max(limits)), limits=limits, expand=self.expand,
            vocab=self.vocab, sampling=DraftSampling(), dice=dice, pack=pack_trees,
            keeps_laws=keeps_laws,
        )  # fmt: skip


def draft(seed: int = 0, words: int = VOCAB) -> TableDraft:
    vocab = DraftVocab.from_counts(torch.arange(VOCAB), size=words)
    return TableDraft(torch.randn(VOCAB, words, generator=torch.Generator().manual_seed(seed)) * 2, vocab)


def rows(proposal: Tree) -> list[list[tuple[int, int, int]]]:
    """Per row (parent, token, depth) of the real nodes."""
    return [
        list(
            zip(
                proposal.parents[row, :count].tolist(),
                proposal.tokens[row, :count].tolist(),
                proposal.depths[row, :count].tolist(),
                strict=True,
            )
        )
        for row, count in enumerate(proposal.counts)
    ]


def best_paths(table: TableDraft, root: int, *, depth: int, width: int) -> dict[tuple[int, ...], float]:
    """Slow twin: log q of every path in the expanded beams, by brute force."""
    beam, found = [((), 0.0)], {}
    for _ in range(depth):
        candidates = []
        for path, score in beam:
            log_q = table.table[path[-1] if path else root].log_softmax(-1)
            for value, word in zip(*(part.tolist() for part in log_q.topk(min(width, len(log_q)))), strict=True):
                token = int(table.vocab.ids[word])
                candidates.append(((*path, token), score + value))
        found.update(candidates)
        beam = sorted(candidates, key=lambda entry: -entry[1])[:width]
    return found


@pytest.mark.parametrize("words", [VOCAB, 5])
@pytest.mark.parametrize("plan", [ProposalPlan(3, 2, 5), ProposalPlan(2, 3, 4), ProposalPlan.chain(4)], ids=str)
def test_a_ranked_tree_keeps_the_best_paths_of_its_beams(plan: ProposalPlan, words: int) -> None:
    table = draft(words=words)
    proposal = table.grow(plan, [1, 6], limits=[9, 9])
    for row, root in enumerate((1, 6)):
        scores = best_paths(table, root, depth=plan.depth, width=plan.width)
        nodes = rows(proposal)[row]
        paths = []
        for node in range(1, len(nodes)):
            path, at = [], node
            while at:
                path.append(nodes[at][1])
                at = nodes[at][0]
            paths.append(tuple(path[::-1]))
        best = sorted(scores, key=lambda path: -scores[path])[: plan.nodes]
        assert sorted(paths) == sorted(best)
        assert len(nodes) == min(plan.nodes, len(scores)) + 1


def test_children_are_tried_best_first() -> None:
    table = draft(seed=3)
    proposal = table.grow(ProposalPlan(1, 4, 4), [2], limits=[9])
    order = [int(proposal.tokens[0, child]) for child in proposal.children[0][0]]
    assert order == table.table[2].topk(4).indices.tolist()


def test_ties_go_to_the_smaller_token_and_never_to_a_child_before_its_parent() -> None:
    flat = TableDraft(torch.zeros(VOCAB, VOCAB), DraftVocab.full(VOCAB))
    flat.table[:, 3] = 60.0  # certain: log q = 0, so that a child ties with its parent
    proposal = flat.grow(ProposalPlan(4, 2, 3), [0], limits=[9])
    assert rows(proposal)[0] == [(-1, 0, 0), (0, 3, 1), (1, 3, 2), (2, 3, 3)]
    even = TableDraft(torch.zeros(VOCAB, VOCAB), DraftVocab.full(VOCAB))
    kept = rows(even.grow(ProposalPlan(1, 8, 3), [0], limits=[9]))[0]
    assert [token for _, token, _ in kept] == [0, 0, 1, 2]


@pytest.mark.parametrize("law", ["ranked", "sampled"])
@pytest.mark.parametrize("limits", [[3, 1, 0], [1, 1, 1], [0, 2, 5]])
def test_no_path_is_longer_than_its_rows_limit_and_rows_do_not_see_their_neighbours(law, limits) -> None:  # type: ignore[no-untyped-def]
    plan = ProposalPlan(3, 2, 6, law=law)
    together = draft().grow(plan, [1, 4, 6], limits=limits, seeds=[7, 8, 9])
    for row, limit in enumerate(limits):
        nodes = rows(together)[row]
        assert max(depth for _, _, depth in nodes) == min(limit, 3)
        if limit:
            alone = draft().grow(plan, [(1, 4, 6)[row]], limits=[limit], seeds=[7 + row])
            assert rows(alone)[0] == nodes
            assert alone.children[0] == together.children[row]


@pytest.mark.parametrize("plan", [ProposalPlan(3, 4, 10, law="sampled"), ProposalPlan(2, 3, 7, law="sampled")], ids=str)
def test_a_sampled_tree_keeps_its_budget_and_the_laws_it_was_drawn_from(plan: ProposalPlan) -> None:
    for seed in range(12):
        table = draft(seed, words=6)
        proposal = table.grow(plan, [1, 3], limits=[9, 9], seeds=[seed, seed + 100])
        assert proposal.draft_law is not None
        for row in range(2):
            assert proposal.counts[row] - 1 <= plan.nodes
            for node, below in enumerate(proposal.children[row]):
                tokens = [int(proposal.tokens[row, child]) for child in below]
                assert len(set(tokens)) == len(tokens)
                if below:
                    law = proposal.draft_law[row][node]
                    want = table.vocab.expand(table.table[int(proposal.tokens[row, node])].softmax(-1))
                    torch.testing.assert_close(law, want)
                    assert (law[tokens] > 0).all()


def test_a_used_up_support_leaves_fewer_children() -> None:
    table = draft()
    table.table[:] = -torch.inf
    table.table[:, 2], table.table[:, 5] = 0.0, 1.0
    proposal = table.grow(ProposalPlan(2, 4, 12, law="sampled"), [0], limits=[9])
    assert sorted(int(proposal.tokens[0, child]) for child in proposal.children[0][0]) == [2, 5]
    assert all(token in (0, 2, 5) for _, token, _ in rows(proposal)[0])
    assert bool(torch.isfinite(proposal.mask.float()).all())


def test_the_hidden_state_of_a_node_is_its_parents() -> None:
    table = draft(seed=2)
    table.grow(ProposalPlan(3, 3, 9), [1, 5], limits=[9, 9])
    for level, before in zip(table.levels[1:], table.levels, strict=False):
        assert torch.equal(level.hidden[:, :, 0], before.tokens.gather(1, level.parents).float())
    assert torch.equal(table.levels[0].hidden[:, :, 0], torch.tensor([[1.0], [5.0]]).expand(-1, 3))


@pytest.mark.parametrize("fields", [{"depth": 0}, {"width": 0}, {"nodes": 0}, {"law": "guessed"}])
def test_a_plan_without_a_tree_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="proposal"):
        ProposalPlan(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", ["ranked", "sampled"])
@pytest.mark.parametrize("words", [VOCAB, 5])
def test_laws_are_kept_for_whoever_asks_and_the_tree_is_the_same(law, words):
    plan, table = ProposalPlan(depth=3, width=3, nodes=7, law=law), draft(words=words)
    bare = table.grow(plan, [1, 4], limits=[3, 2])
    told = table.grow(plan, [1, 4], limits=[3, 2], keeps_laws=True)
    assert bare.log_laws is None and told.log_laws is not None
    assert rows(bare) == rows(told) and bare.children == told.children
    for row, laws in enumerate(told.log_laws):
        parents = {parent for parent, _, _ in rows(told)[row] if parent >= 0}
        assert parents <= set(laws) <= set(range(told.counts[row]))
        for node, log_law in laws.items():
            assert log_law == pytest.approx(table.table[told.tokens[row, node]].log_softmax(-1), abs=1e-6)
