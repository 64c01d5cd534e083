"""Acceptance case 2 (K37) and the arithmetic of the metrics: both definitions, any batching, errors over prompts."""

import math

import numpy as np
import pytest

from paceline.decoding.propose import pack_trees
from paceline.decoding.stats import RunStats
from paceline.measure.metrics import (
    Estimate,
    Measured,
    acceptance_figures,
    estimate,
    measured,
    plain_figures,
    speculative_figures,
    speed_figures,
    time_shares,
)
from paceline.records import Verdict

DEPTH = 3


def run_of(batch: list[int], *, first: int = 0) -> RunStats:
    """One round of a chain of three per row; row i accepts batch[i] of it."""
    proposal = pack_trees([[-1, 0, 1, 2]] * len(batch), [[9, 1, 2, 3]] * len(batch))
    stats = RunStats()
    for row, accepted in enumerate(batch):
        verdict = Verdict(list(range(accepted + 1)), [*range(1, accepted + 1), 7], accepted, False)
        stats.count_round(first + row, proposal, row, verdict)
    return stats


@pytest.mark.parametrize(
    "batches",
    [[[3, 2, 1, 0]], [[3, 2], [1, 0]], [[3], [2], [1], [0]], [[0, 1, 2], [3]]],
    ids=["one batch", "two batches", "four batches", "uneven"],
)
def test_runs_of_3_2_1_0_give_the_same_figures_in_any_batching(batches):
    calls = [measured(run_of(batch), tokens=sum(batch) + len(batch), wall=1.0) for batch in batches]
    figures = acceptance_figures(calls)
    assert figures["accepted_drafted"].value == 1.5
    assert figures["accepted_length"].value == 2.5
    assert figures["drafted_share"].value == 6 / 10 == (2.5 - 1) / 2.5
    assert figures["nodes_per_round"].value == DEPTH
    depths = speculative_figures(calls, calls)
    assert [depths[f"cumulative_{depth}"].value for depth in (1, 2, 3)] == [3 / 4, 2 / 4, 1 / 4]
    assert [depths[f"conditional_{depth}"].value for depth in (1, 2, 3)] == [3 / 4, 2 / 3, 1 / 2]


def test_the_mean_over_rounds_is_not_the_mean_over_requests():
    short, long = measured(run_of([3]), tokens=4, wall=1.0), measured(run_of([0, 0, 0]), tokens=3, wall=1.0)
    figures = acceptance_figures([short, long])
    assert figures["accepted_length"].value == 7 / 4
    assert figures["accepted_length_by_request"].value == (4 + 1) / 2


def test_one_row_of_many_rounds_counts_like_many_rows():
    stats = RunStats()
    for accepted in (3, 2, 1, 0):
        for index, row in run_of([accepted]).rows.items():
            total = stats.rows.setdefault(index, type(row)())
            total.rounds += row.rounds
            total.accepted += row.accepted
            total.emitted += row.emitted
    assert stats.rows[0].accepted_length == 2.5


def decode(*, tokens=10, wall=1.0, prefill=0.0, rounds=9, target=0.0, draft=0.0, emitted=9, accepted=0) -> Measured:
    return Measured(
        tokens=tokens, wall=wall, prefill=prefill, rounds=rounds, target=target, draft=draft, emitted=emitted,
        accepted=accepted,
    )  # fmt: skip


def test_wall_speed_up_is_the_ratio_of_sums_and_contains_prefill():
    plain = [decode(wall=2.0, prefill=1.0), decode(wall=4.0, prefill=1.0)]
    draft = [decode(wall=1.5, prefill=1.0), decode(wall=2.5, prefill=1.0)]
    figures = speculative_figures(plain, draft)
    assert figures["s_wall"].value == pytest.approx(6 / 4)
    assert figures["s_decode"].value == pytest.approx(4 / 2)
    assert figures["tokens_per_s_plain"].value == pytest.approx(20 / 6)
    assert figures["tokens_per_s_draft"].value == pytest.approx(20 / 4)


def test_outputs_of_other_lengths_are_compared_by_the_token():
    figures = speed_figures([decode(tokens=10, wall=1.0)], [decode(tokens=20, wall=1.0)])
    assert figures["s_wall"].value == pytest.approx(2.0)


def test_the_model_is_length_times_plain_over_verify_and_draft():
    plain = [decode(rounds=10, target=1.0)]
    draft = [decode(rounds=4, target=0.6, draft=0.2, emitted=10, accepted=6)]
    figures = speculative_figures(plain, draft)
    length, t_plain, t_verify, t_draft = (
        figures[name].value for name in ("accepted_length", "t_plain", "t_verify", "t_draft")
    )
    assert (length, t_plain) == (2.5, 0.1)
    assert t_verify == pytest.approx(0.15)
    assert t_draft == pytest.approx(0.05)
    assert figures["s_model"].value == pytest.approx(length * t_plain / (t_verify + t_draft))


def test_the_error_of_a_mean_is_its_textbook_value():
    values = np.random.default_rng(1).normal(5.0, 2.0, size=400)
    columns = {"value": values, "one": np.ones(400)}
    found = estimate(columns, statistics={"mean": lambda sums: sums["value"] / sums["one"]})["mean"]
    assert found.value == pytest.approx(values.mean())
    assert found.error == pytest.approx(values.std() / math.sqrt(400), rel=0.06)
    assert found.low == pytest.approx(found.value - 1.96 * found.error, abs=0.02)
    assert found.high == pytest.approx(found.value + 1.96 * found.error, abs=0.02)


def test_turns_of_one_conversation_are_resampled_together():
    values = [float(number) for number in range(40)]
    statistics = {"mean": lambda sums: sums["value"] / sums["one"]}
    once = estimate({"value": np.array(values), "one": np.ones(40)}, statistics=statistics)
    twice = {"value": np.repeat(values, 2), "one": np.ones(80)}
    grouped = estimate(twice, statistics=statistics, groups=[number // 2 for number in range(80)])
    naive = estimate(twice, statistics=statistics)
    assert grouped["mean"].error == pytest.approx(once["mean"].error)
    assert naive["mean"].error < 0.8 * grouped["mean"].error


def test_the_same_seed_gives_the_same_error():
    calls = [decode(wall=float(number)) for number in range(1, 6)]
    one, two, other = (plain_figures(calls, seed=seed) for seed in (0, 0, 1))
    assert one == two != other


def test_one_prompt_has_no_error_and_nothing_counted_has_no_value():
    figures = plain_figures([decode(rounds=0, target=0.0)])
    assert figures["t_plain"] == Estimate(None)
    assert figures["tokens_per_s_plain"] == Estimate(10.0)


def test_phases_and_the_rest_are_the_whole():
    call = Measured(tokens=5, wall=10.0, prefill=1.0, draft=2.0, target=5.0, verify=0.5)
    shares = time_shares([call, call])
    assert shares == pytest.approx({"prefill": 0.1, "draft": 0.2, "target": 0.5, "verify": 0.05, "other": 0.15})
    assert time_shares([]) == {}


def test_a_decoder_without_statistics_has_its_tokens_and_its_time():
    assert measured(None, tokens=3, wall=0.5) == Measured(tokens=3, wall=0.5)
