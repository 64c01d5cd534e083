"""The walk down a tree: its shortcut by argmax is the rule on one-hot laws; what is cut off counts nowhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exact.enumeration import outcomes
from paceline.decoding.propose import pack_trees
from paceline.decoding.sampling import RowDice
from paceline.decoding.stats import RunStats, conditional_acceptance, cumulative_acceptance
from paceline.decoding.verify import Recorder, walk
from paceline.errors import TargetError
from paceline.records import Tree, Verdict

VOCAB = 6
NEVER = 1.0e4  # what an unlikely token lies behind: exp(-1e4) is 0, so the law is one-hot


def random_tree(generator: torch.Generator, *, nodes: int = 9, with_law: bool) -> Tree:
    """Distinct children under every parent, as a draft without replacement draws them."""
    parents, tokens = [-1], [0]
    while len(parents) < nodes:
        parent = int(torch.randint(0, len(parents), (), generator=generator))
        taken = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        token = int(torch.randint(0, VOCAB, (), generator=generator))
        if token not in taken:
            parents.append(parent)
            tokens.append(token)
    laws = [{n: torch.softmax(torch.randn(VOCAB, generator=generator), -1) for n in range(nodes)}] if with_law else None
    return pack_trees([parents], [tokens], laws)


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("with_process", [False, True])
def test_the_shortcut_is_the_rule_on_one_hot_laws(with_law: bool, with_process: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths: set[int] = set()

    def process(ids: list[int], logits: Tensor) -> Tensor:
        return logits.roll(sum(ids) % VOCAB)

    for trial in range(60):
        proposal = random_tree(generator, with_law=with_law)
        logits = torch.zeros(9, VOCAB)
        for node in range(9):
            likely = [int(proposal.tokens[0, child]) for child in proposal.children[0][node]] or [0]
            best = likely[trial % len(likely)] if trial % 3 else trial % VOCAB
            logits[node, best] = NEVER
        verdicts = []
        for dice in (None, RowDice(trial)):
            ids = [3, 1]
            if dice is not None:
                dice.begin_round(2)
            shown = process if with_process else None
            verdict = walk(proposal, 0, logits, ids=ids, process=shown, is_stop=lambda seen: len(seen) >= 6, dice=dice)
            verdicts.append(verdict)
            assert ids == [3, 1, *verdicts[-1].tokens]
        assert verdicts[0] == verdicts[1]
        lengths.add(len(verdicts[0].tokens))
    assert lengths >= {1, 2, 3}


def test_a_drawn_child_is_kept_as_often_as_the_two_laws_overlap() -> None:
    """The rule for ranked children would be exact too, and keep fewer: the law it was drawn from must be used."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, VOCAB, generator=generator)
    p = logits[0].double().softmax(-1)
    q = torch.randn(VOCAB - 1, generator=generator).softmax(-1)  # one word short: the target's vocabulary is padded
    kept = 0.0
    for token in range(VOCAB - 1):
        proposal = pack_trees([[-1, 0]], [[0, token]], [{0: q}])

        def run(proposal: Tree = proposal) -> Verdict:
            return walk(proposal, 0, logits, ids=[0], process=None, is_stop=lambda ids: True, dice=RowDice(0))

        kept += float(q[token]) * sum(chance for verdict, chance in outcomes(run) if verdict.accepted)
    assert kept == pytest.approx(float(torch.minimum(p[:-1], q).sum()), abs=1e-6)


def test_processors_see_the_path_and_are_called_once_for_each_committed_token() -> None:
    proposal = pack_trees([[-1, 0, 0, 2]], [[0, 4, 1, 2]])
    logits = torch.zeros(4, VOCAB)
    for node, best in [(0, 1), (2, 2), (3, 5)]:
        logits[node, best] = 1.0
    seen: list[list[int]] = []

    def process(ids: list[int], scores: Tensor) -> Tensor:
        seen.append(list(ids))
        return scores

    record = Recorder([], [])
    verdict = walk(
        proposal, 0, logits, ids=[9, 0], process=process, is_stop=lambda ids: False, dice=None, record=record
    )
    assert verdict == Verdict(path=[0, 2, 3], tokens=[1, 2, 5], accepted=2, stopped=False)
    assert seen == [[9, 0], [9, 0, 1], [9, 0, 1, 2]]
    assert len(record.scores) == len(record.logits) == 3
    assert torch.equal(record.logits[1], logits[2])


@pytest.mark.parametrize(("stop_at", "accepted", "tokens"), [(1, 1, [1]), (2, 2, [1, 2]), (5, 2, [1, 2, 5])])
def test_what_a_stop_cuts_off_is_neither_committed_nor_counted(stop_at: int, accepted: int, tokens: list[int]) -> None:
    proposal = pack_trees([[-1, 0, 1]], [[0, 1, 2]])
    logits = torch.eye(VOCAB)[[1, 2, 5]]
    verdict = walk(proposal, 0, logits, ids=[0], process=None, is_stop=lambda ids: ids[-1] == stop_at, dice=None)
    assert verdict.stopped
    assert verdict.tokens == tokens
    assert verdict.accepted == accepted
    stats = RunStats()
    stats.count_round(0, proposal, 0, verdict)
    assert stats.total.emitted == len(tokens)
    assert stats.total.accepted == accepted
    assert dict(stats.total.runs) == {accepted: 1}
    assert dict(stats.total.offered) == dict.fromkeys(range(1, accepted + 1), 1)


def test_scores_that_are_not_numbers_are_an_error_and_not_a_token() -> None:
    proposal = pack_trees([[-1, 0]], [[0, 1]])
    dice = RowDice(0)
    dice.begin_round(1)
    with pytest.raises(TargetError, match="scores of token 1 are not numbers"):
        walk(
            proposal, 0, torch.full((2, VOCAB), torch.nan), ids=[0], process=None, is_stop=lambda ids: False, dice=dice
        )


def test_counts_of_accepted_runs_3_2_1_0() -> None:
    proposal = pack_trees([[-1, 0, 1, 2]], [[0, 1, 2, 3]])
    stats = RunStats()
    for row, accepted in enumerate((3, 2, 1, 0)):
        path = list(range(accepted + 1))
        stats.count_round(row, proposal, 0, Verdict(path, [7] * (accepted + 1), accepted, False))
    total = stats.total
    assert (total.accepted / total.rounds, total.accepted_length) == (1.5, 2.5)
    assert cumulative_acceptance(total) == [3 / 4, 2 / 4, 1 / 4]
    assert conditional_acceptance(total) == [3 / 4, 2 / 3, 1 / 2]
    assert [stats.rows[row].drafted for row in range(4)] == [3] * 4


def test_a_leaf_offers_nothing() -> None:
    stats = RunStats()
    stats.count_round(0, pack_trees([[-1]], [[0]]), 0, Verdict([0], [5], 0, False))
    assert stats.total.rounds == stats.total.emitted == 1
    assert not stats.total.offered
    assert conditional_acceptance(stats.total) == []
