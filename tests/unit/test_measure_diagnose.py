"""Diagnosis of trees made by hand: every figure has a known answer, and what cannot be judged is not counted."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import NoDraft, pack_trees
from paceline.decoding.stats import RunStats
from paceline.errors import DataError, UnsupportedOption
from paceline.measure.diagnose import Miss, Reader, Round, count
from paceline.measure.diagnose_record import Diagnosed, Diagnosis, build_diagnosis, draft_figures
from paceline.ops.vocab import DraftVocab
from paceline.records import Tree, Verdict

PLAN = ProposalPlan(depth=2, width=2, nodes=3)
VOCAB = DraftVocab.from_counts(torch.tensor([9, 9, 9, 9, 0, 0]), size=4)  # of 6 tokens the draft knows 0 to 3
ROOT, FIRST, SECOND = [0.55, 0.35, 0.05, 0.05], [0.25] * 4, [0.05, 0.05, 0.85, 0.05]


def logs(law: list[float]) -> torch.Tensor:
    return torch.tensor(law, dtype=torch.float64).log()


def tree(laws: dict[int, list[float]] | None = None) -> Tree:
    """root -> 1 (token 0, q 0.55), 2 (token 1, q 0.35); 2 -> 3 (token 2, q 0.85): the greedy path 0, ? is pruned."""
    known = {0: ROOT, 1: FIRST, 2: SECOND} if laws is None else laws
    return pack_trees([[-1, 0, 0, 2]], [[7, 0, 1, 2]], log_laws=[{node: logs(law) for node, law in known.items()}])


def read(verdict: Verdict, proposal: Tree | None = None, *, plan: ProposalPlan = PLAN, limit: int = 9) -> Round:
    each = Reader(VOCAB, plan).read(proposal or tree(), 0, verdict, limit=limit)
    assert each is not None
    return each


DEEP = Verdict([0, 2, 3], [1, 2, 5], accepted=2, stopped=False)  # the target followed 1, 2 and left the tree below
ALONG = Verdict([0, 1], [0, 3], accepted=1, stopped=False)  # the target followed the greedy path and left it
BEYOND = Verdict([0], [2], accepted=0, stopped=False)
UNKNOWN = Verdict([0], [4], accepted=0, stopped=False)
ENDED = Verdict([0], [1], accepted=1, stopped=True)  # node 2 ends the row, and a verdict leaves such a node out
PROMPT = [read(each) for each in (DEEP, ALONG, BEYOND, UNKNOWN)]


def figures(*prompts: list[Round]) -> dict:
    nothing = {"rounds": 0.0, "emitted": 0.0, "drafted": 0.0, "tokens": 0.0}
    return draft_figures([{**count(rounds), **nothing} for rounds in prompts])


def entropy(law: list[float]) -> float:
    return -sum(q * math.log(q) for q in law)


def test_a_greedy_path_that_was_not_wholly_verified_is_pruned():
    assert PROMPT[0].greedy == [1]
    found = figures(PROMPT)
    assert (found["pruned_share"], found["greedy_kept_share"]) == (1.0, 0.5)
    shallow = figures([read(ALONG, limit=1)])  # the row had room for one more token: the path ends at depth 1
    assert (shallow["pruned_share"], shallow["greedy_kept_share"], shallow["greedy_whole"]) == (0.0, 1.0, 1.0)
    chain = pack_trees([[-1, 0, 1]], [[7, 0, 3]], log_laws=[{0: logs(ROOT), 1: logs([0.1, 0.1, 0.1, 0.7])}])
    both = Verdict([0, 1, 2], [0, 3, 4], accepted=2, stopped=False)
    found = figures([read(both, chain, plan=ProposalPlan.chain(2))])
    assert (found["pruned_share"], found["greedy_kept_share"], found["greedy_whole"]) == (0.0, 1.0, 1.0)


def test_of_equally_likely_tokens_the_verified_one_is_the_greedy_one():
    proposal = pack_trees([[-1, 0, 1]], [[7, 0, 3]], log_laws=[{0: logs(ROOT), 1: logs(FIRST)}])
    assert read(ALONG, proposal).greedy == [1, 2]


def test_coincidence_says_what_rounds_without_an_accepted_token_count_as():
    found = figures(PROMPT)  # two of four rounds accept something, one of them along the greedy path
    assert found["accepting_share"] == found["greedy_coincidence"] == 0.5
    assert (found["greedy_coincidence_all"], found["greedy_coincidence_strict"]) == (0.75, 0.25)
    assert found["greedy_whole"] == 0.0
    assert figures([read(BEYOND)])["greedy_coincidence"] is None


@pytest.mark.parametrize(
    ("verdict", "miss"),
    [
        (DEEP, Miss("depth")),
        (ALONG, Miss("pruned", 1)),
        (BEYOND, Miss("width", 3)),
        (UNKNOWN, Miss("vocabulary")),
        (Verdict([0], [99], accepted=0, stopped=True), Miss("vocabulary")),  # an id of the target's padding
        (ENDED, None),
    ],
)
def test_why_the_target_left_the_proposal(verdict, miss):
    assert read(verdict).miss == miss


def test_a_node_at_which_the_draft_was_not_run_has_no_rank():
    each = read(ALONG, tree({0: ROOT, 2: SECOND}))
    assert each.miss == Miss("unread") and each.greedy == [1]


def test_misses_are_shares_of_the_rounds_that_missed():
    misses = figures([*PROMPT, read(ENDED)])["misses"]
    assert (misses["rounds"], misses["ended_by_draft"]) == (4, 1)
    assert {reason: each["share"] for reason, each in misses["reasons"].items()} == {
        "depth": 0.25, "vocabulary": 0.25, "pruned": 0.25, "width": 0.25, "unread": 0.0,
    }  # fmt: skip
    ranks = {each["first"]: (each["last"], each["count"], each["share"]) for each in misses["ranks"]}
    assert ranks[1] == (1, 1, 0.5) and ranks[3] == (3, 1, 0.5) and ranks[5] == (8, 0, 0.0) and ranks[129][0] is None


def test_calibration_by_hand():
    found = figures([read(DEEP)])  # token: 0.55 no, 0.35 yes, 0.85 yes; path: 0.55 no, 0.35 yes, 0.35 * 0.85 yes
    assert found["token_calibration_error"] == pytest.approx((0.55 + 0.65 + 0.15) / 3, rel=1e-5)
    assert found["token_excess"] == pytest.approx((0.55 + 0.35 + 0.85 - 2) / 3, rel=1e-5)
    assert found["path_calibration_error"] == pytest.approx((0.55 + 0.65 + 0.7025) / 3, rel=1e-5)
    bins = found["calibration"]["token"]
    assert [each["count"] for each in bins] == [0, 0, 0, 1, 0, 1, 0, 0, 1, 0]
    assert (bins[5]["accepted"], bins[3]["accepted"], bins[0]["accepted"]) == (0.0, 1.0, None)
    assert bins[8]["confidence"] == pytest.approx(0.85)
    assert [each["count"] for each in found["calibration"]["path"]] == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0]


def test_two_rounds_in_a_bin_are_averaged_before_they_are_compared():
    found = figures([read(ALONG), read(BEYOND)])  # tokens: 0.55 yes, 0.35 no; 0.55 no, 0.35 no
    assert found["token_calibration_error"] == pytest.approx((2 * abs(0.5 - 0.55) + 2 * 0.35) / 4, rel=1e-4)
    assert sum(each["count"] for each in found["calibration"]["token"]) == 4  # node 3's parent was rejected
    assert sum(each["count"] for each in found["calibration"]["path"]) == 6


def test_entropy_where_tokens_were_accepted_missed_and_behind_a_rejected_one():
    found = figures([read(DEEP)])
    assert found["entropy_accepted"] == pytest.approx((entropy(ROOT) + entropy(SECOND)) / 2, rel=1e-4)
    assert found["entropy_rejected"] is None  # nothing was offered after node 1 or after node 3
    found = figures([read(BEYOND)])
    assert found["entropy_missed"] == pytest.approx(entropy(ROOT), rel=1e-4)
    assert found["entropy_behind"] == pytest.approx(entropy(SECOND), rel=1e-4)
    assert found["entropy_rejected"] == pytest.approx((entropy(ROOT) + entropy(SECOND)) / 2, rel=1e-4)
    assert found["entropy"]["counts"] == {"accepted": 0, "missed": 1, "behind": 1}
    histogram = found["entropy"]["histogram"]
    assert sum(histogram["rejected"]) == 2 and sum(histogram["accepted"]) == 0
    assert histogram["rejected"][int(entropy(ROOT) / 0.25)] == 1


def test_what_stands_behind_the_end_of_a_row_is_not_judged():
    each = read(ENDED)
    assert each.path == [2]
    found = figures([each])  # node 3 was never asked for, nor the law behind node 2
    assert sum(row["count"] for row in found["calibration"]["token"]) == 2
    assert sum(row["count"] for row in found["calibration"]["path"]) == 2
    assert found["entropy"]["counts"] == {"accepted": 1, "missed": 0, "behind": 0}


def test_a_round_without_room_for_a_drafted_token_is_none():
    root = NoDraft().propose([7], limits=[], dice=[])
    assert Reader(VOCAB, PLAN).read(root, 0, Verdict([0], [3], accepted=0, stopped=True), limit=0) is None
    with pytest.raises(UnsupportedOption, match="does not tell its laws"):
        Reader(VOCAB, PLAN).read(root, 0, Verdict([0], [3], accepted=0, stopped=True), limit=1)


def diagnosed(*verdicts: Verdict, tokens: list[int]) -> Diagnosed:
    stats = RunStats()
    for verdict in verdicts:
        stats.count_round(0, tree(), 0, verdict)
    return Diagnosed(tokens, stats.total, [read(verdict) for verdict in verdicts])


def test_a_record_has_figures_errors_and_paired_differences():
    one = [diagnosed(DEEP, BEYOND, tokens=[1, 2]), diagnosed(ALONG, tokens=[3])]
    two = [diagnosed(ALONG, BEYOND, tokens=[1, 2]), diagnosed(ALONG, tokens=[4])]
    run = Diagnosis("a tree", ["a:1", "a:2"], {"one": ({}, one), "two": ({"kind": "x"}, two)}, True, {"seed": 0})
    record = build_diagnosis(run)
    assert record["identical"] is False
    first, second = record["drafts"]
    assert (first["name"], second["about"], first["rounds"], first["tokens"]) == ("one", {"kind": "x"}, 3, 3)
    assert first["accepted_length"] == pytest.approx((3 + 1 + 2) / 3)
    assert first["greedy_coincidence"] == 0.5 and first["greedy_coincidence_se"] > 0
    depths = first["acceptance_by_depth"]
    assert [(row["depth"], row["offered"]) for row in depths] == [(1, 3), (2, 1)]
    assert depths[0]["conditional"] == depths[0]["cumulative"] == pytest.approx(2 / 3)
    assert (depths[1]["conditional"], depths[1]["cumulative"]) == (1.0, pytest.approx(1 / 3))
    difference = record["differences"][0]
    assert (difference["draft"], difference["against"]) == ("two", "one")
    assert difference["accepted_length"] == pytest.approx(-1 / 3)
    assert difference["greedy_coincidence"] == 0.5
    assert record["requests"]["one"]["coinciding"] == [0, 1]


def test_paired_differences_of_the_same_rounds_have_no_error():
    prompts = [diagnosed(DEEP, BEYOND, tokens=[1]), diagnosed(ALONG, tokens=[2])]
    run = Diagnosis("a tree", ["a:1", "a:2"], {"one": ({}, prompts), "two": ({}, prompts)}, True, {})
    record = build_diagnosis(run)
    assert record["identical"] is True
    difference = record["differences"][0]
    assert difference["accepted_length"] == difference["accepted_length_se"] == 0.0


def test_nothing_drafted_is_said():
    empty = Diagnosed([1], RunStats().total, [])
    with pytest.raises(DataError, match="ask for more new tokens"):
        build_diagnosis(Diagnosis("a tree", ["a:1"], {"one": ({}, [empty])}, True, {}))
