"""Lookup proposals merged into a tree, and dice that belong to a row alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.decoding.binding import make_proposer
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import LookupProposer, NoDraft
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts import ngram
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import ConfigError, UnsupportedOption


class Fixed:
    """Says the same candidates whatever the context."""

    def __init__(self, *candidates: list[int]) -> None:
        self.candidates = list(candidates)
        self.asked: list[tuple[int, int]] = []

    def continuations(self, context: Sequence[int], *, length: int, count: int) -> list[list[int]]:
        self.asked.append((length, count))
        return self.candidates[:count]


def proposed(draft: object, plan: ProposalPlan, *, limits: Sequence[int] = (9,), roots: Sequence[int] = (0,)):  # type: ignore[no-untyped-def]
    proposer = LookupProposer(draft, plan)  # type: ignore[arg-type]
    proposer.begin(len(roots), capacity=64)
    proposer.observe([[root] for root in roots], context=[[5, root] for root in roots], taps=None)
    return proposer.propose(roots, limits=limits, dice=[])


def test_candidates_share_their_common_beginnings() -> None:
    draft = Fixed([1, 2, 3], [1, 2, 4], [1, 5], [6, 2, 3], [1, 2, 3])
    tree = proposed(draft, ProposalPlan(3, 5, 20))
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 2, 1, 0, 6, 7]
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3]
    assert tree.children[0][0] == [1, 6]
    assert tree.children[0][2] == [3, 4]
    assert tree.depths[0].tolist() == [0, 1, 2, 3, 3, 2, 1, 2, 3]
    assert tree.draft_law is None


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_budget_ends_a_candidate_where_it_is_used_up(nodes: int) -> None:
    tree = proposed(Fixed([1, 2, 3], [1, 4, 5], [6]), ProposalPlan(3, 3, nodes))
    assert tree.counts == [nodes + 1]
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 4][: nodes + 1]


def test_limits_by_row_and_roots_alone() -> None:
    draft = Fixed([1, 2, 3])
    tree = proposed(draft, ProposalPlan.chain(3), limits=[2, 0, 9], roots=[7, 8, 9])
    assert tree.counts == [3, 1, 4]
    assert [asked[0] for asked in draft.asked] == [2, 3]  # nothing is looked up for a row that may not draft
    assert tree.tokens[:, 0].tolist() == [7, 8, 9]
    assert tree.parents[1].tolist() == [-1, -1, -1, -1]


def test_a_draft_that_says_more_than_it_is_asked_for_is_cut() -> None:
    assert proposed(Fixed([1, 2, 3, 4, 5]), ProposalPlan(2, 1, 9)).counts == [3]
    assert proposed(Fixed(), ProposalPlan(2, 1, 9)).counts == [1]


def test_rows_that_end_take_their_context_along() -> None:
    proposer = LookupProposer(Ngram(NgramConfig()), ProposalPlan.chain(2))
    proposer.begin(3, capacity=9)
    contexts = [[1, 2, 1], [3, 4, 3], [5, 6, 5]]
    proposer.observe([], context=contexts, taps=None)
    proposer.keep_rows([2, 0])
    assert proposer.propose([5, 1], limits=[1, 1], dice=[]).tokens.tolist() == [[5, 6], [1, 2]]


def test_no_draft_is_a_tree_of_one_node() -> None:
    tree = NoDraft().propose([4, 5], limits=[3, 3], dice=[])
    assert tree.counts == [1, 1]
    assert tree.tokens.tolist() == [[4], [5]]
    assert tree.mask.all()


def test_a_lookup_has_no_law_to_draw_from() -> None:
    with pytest.raises(UnsupportedOption, match="ranked"):
        make_proposer(Fixed(), None, plan=ProposalPlan.chain(2, law="sampled"), sampling=DraftSampling())  # type: ignore[arg-type]


def test_the_longest_and_latest_match_comes_first() -> None:
    context = [1, 2, 3, 9, 2, 3, 8, 7, 3, 6, 1, 2, 3]
    found = Ngram(NgramConfig()).continuations(context, length=2, count=3)
    assert found == [[9, 2], [8, 7], [6, 1]]
    assert Ngram(NgramConfig(longest=1)).continuations(context, length=1, count=9) == [[6], [8], [9]]
    assert Ngram(NgramConfig()).continuations([4], length=2, count=1) == []
    assert Ngram(NgramConfig(shortest=2)).continuations([5, 3, 4, 3], length=2, count=1) == []


@pytest.mark.parametrize("options", [{"longest": 1, "shortest": 2}, {"shortest": 0}, {"widest": 3}, {"longest": "x"}])
def test_wrong_options_of_the_lookup_are_one_line_of_ours(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ngram.configure(None, options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert "ngram" in str(caught.value)


def test_dice_depend_on_seed_and_place_only() -> None:
    law = torch.full((1, 50), 0.02)

    def thrown(seed: int, committed: int, *, before: int = 0) -> tuple[list[int], float]:
        dice = RowDice(seed)
        for place in range(before):  # other rounds before this one leave no trace
            dice.begin_round(place)
            dice.draw_children(law, count=3)
        dice.begin_round(committed)
        return dice.draw_children(law, count=3)[0].tolist(), float(torch.rand((), generator=dice.verify))

    assert thrown(3, 7) == thrown(3, 7, before=5)
    throws = [thrown(seed, place) for seed in range(8) for place in range(8)]
    assert len({tuple(children) for children, _ in throws}) == 64
    assert len({coin for _, coin in throws}) == 64


def test_how_many_children_are_drawn_does_not_move_the_coins() -> None:
    coins = []
    for count in (1, 6):
        dice = RowDice(11)
        dice.begin_round(2)
        dice.draw_children(torch.full((2, 9), 1 / 9), count=count)
        coins.append(float(torch.rand((), generator=dice.verify)))
    assert coins[0] == coins[1]


def test_first_throws_of_neighbouring_seeds_are_even() -> None:
    """Seeds 0, 1, 2, ... are what a batch uses; their first coins must look uniform and uncorrelated."""
    coins, picks = [], []
    for seed in range(3000):
        dice = RowDice(seed)
        dice.begin_round(5)
        picks.append(int(dice.draw_children(torch.full((1, 10), 0.1), count=1)))
        coins.append(float(torch.rand((), generator=dice.verify, dtype=torch.float64)))
    counts = torch.bincount(torch.tensor(picks), minlength=10).double()
    assert float(((counts - 300) ** 2 / 300).sum()) < 33.7  # chi-square, 9 degrees, p = 1e-4
    thrown = torch.tensor(coins)
    assert abs(float(thrown.mean()) - 0.5) < 0.021
    together = torch.stack([thrown, torch.tensor(picks).double(), thrown.roll(1)])
    assert float((torch.corrcoef(together) - torch.eye(3)).abs().max()) < 0.075
