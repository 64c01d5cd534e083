"""Paired figures by hand: ratios of sums, gains, and the two parts of an error."""

from __future__ import annotations

import math
import statistics

import pytest

from paceline.errors import DataError
from paceline.measure.metrics import Measured
from paceline.measure.paired import Sample, draft_figures, gain_figures, mean_over_seeds


def sample(prompt, seed, *, emitted, rounds, wall, plain_wall=8.0, file="a.jsonl"):
    call = Measured(tokens=emitted + 1, wall=wall, rounds=rounds, emitted=emitted)
    return Sample(prompt, 0, seed, file, Measured(tokens=emitted + 1, wall=plain_wall), call)


BASE = [
    sample(0, 0, emitted=9, rounds=5, wall=4.0),
    sample(1, 0, emitted=19, rounds=10, wall=5.0),
    sample(0, 1, emitted=9, rounds=6, wall=4.0),
    sample(1, 1, emitted=19, rounds=9, wall=5.0),
]
ARM = [
    sample(0, 0, emitted=9, rounds=4, wall=3.0),
    sample(1, 0, emitted=19, rounds=9, wall=4.0),
    sample(0, 1, emitted=9, rounds=5, wall=3.0),
    sample(1, 1, emitted=19, rounds=9, wall=6.0),
]


def test_a_figure_is_a_ratio_of_sums_over_prompts_and_seeds():
    figures = draft_figures(BASE)
    assert figures["accepted_length"].value == pytest.approx(56 / 30)
    assert figures["s_wall"].value == pytest.approx((60 / 18) / (60 / 32))
    assert figures["tokens_per_s"].value == pytest.approx(60 / 18)
    assert figures["accepted_length"].by_seed == {0: pytest.approx(28 / 15), 1: pytest.approx(28 / 15)}


def test_gains_are_per_cent_of_the_baseline():
    gains = gain_figures(BASE, ARM)
    assert gains["length_gain_pct"].value == pytest.approx(100 * (30 / 27 - 1))
    assert gains["s_wall_gain_pct"].value == pytest.approx(100 * (18 / 16 - 1))
    by_seed = gains["length_gain_pct"].by_seed
    assert by_seed == {0: pytest.approx(100 * (15 / 13 - 1)), 1: pytest.approx(100 * (15 / 14 - 1))}


def test_an_error_is_the_root_of_both_parts():
    gain = gain_figures(BASE, ARM)["length_gain_pct"]
    assert gain.over_seeds == pytest.approx(statistics.stdev(gain.by_seed.values()) / math.sqrt(2))
    assert gain.error == pytest.approx(math.hypot(gain.over_prompts, gain.over_seeds))
    # Two prompts: both are drawn with chance 1/2, and one of them twice with chance 1/4 each.
    alone = [100 * (11 / 9 - 1), 100 * (19 / 18 - 1)]
    both = gain.value
    mean = (alone[0] + alone[1] + 2 * both) / 4
    spread = math.sqrt(sum((each - mean) ** 2 for each in (*alone, both, both)) / 4)
    assert gain.over_prompts == pytest.approx(spread, rel=0.05)


def test_a_gain_that_all_prompts_share_has_no_error_however_unlike_they_are():
    faster = [
        sample(each.prompt, each.seed, emitted=each.call.emitted, rounds=each.call.rounds, wall=each.call.wall / 2)
        for each in BASE
    ]
    gain = gain_figures(BASE, faster)["s_wall_gain_pct"]
    assert gain.value == pytest.approx(100) and gain.error == pytest.approx(0, abs=1e-9)
    assert draft_figures(faster)["s_wall"].error > 0.1


def test_pairs_meet_by_prompt_and_seed_in_whatever_order():
    assert gain_figures(BASE, ARM[::-1]) == gain_figures(BASE[::-1], ARM)
    with pytest.raises(DataError, match="other prompts or seeds"):
        gain_figures(BASE, ARM[:3])


def test_one_seed_and_one_prompt_have_no_error():
    one = gain_figures(BASE[:2], ARM[:2])["length_gain_pct"]
    assert one.over_seeds is None and one.error == one.over_prompts > 0
    alone = gain_figures(BASE[:1], ARM[:1])["length_gain_pct"]
    assert (alone.value, alone.error) == (pytest.approx(25), None)
    assert gain_figures([], [])["length_gain_pct"].value is None


def test_a_mean_over_seeds():
    spread = mean_over_seeds({0: 1.0, 1: 3.0, 2: None})
    assert (spread.value, spread.error) == (2.0, pytest.approx(1.0))
    assert mean_over_seeds({0: 5.0}).error is None and mean_over_seeds({0: None}).value is None
