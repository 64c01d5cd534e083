"""Costs read from a log, and steps that cost the same, on made-up timings."""

import pytest

from paceline.training.budget import Spent, equal_steps, seconds_left, spent, step_seconds


def line(step, *, tokens=100, seconds=1.0, supervised=None):
    return {
        "event": "train", "step": step, "tokens": tokens, "tokens_per_s": tokens / seconds,
        "supervised_tokens": supervised or step * 60,
    }  # fmt: skip


def score(step, length):
    return {"event": "validation", "step": step, "accepted_length": length, "standard_error": 0.1}


def test_what_a_log_says_of_its_run():
    events = [line(2, seconds=3.0), score(2, 1.5), line(4, tokens=120, seconds=2.0), score(4, 1.4), line(5)]
    assert spent(events) == Spent(5, 320, 300, pytest.approx(6.0), 1.4, 0.1, 1.5, 2)
    assert spent([]) == Spent(0, 0, 0, 0, None, None, None, None)


def test_the_first_steps_of_a_trial_do_not_count():
    events = [line(1, seconds=9.0), line(2, seconds=5.0), score(2, 1.0), line(3, seconds=1.0), line(4, seconds=2.0)]
    assert step_seconds(events) == pytest.approx(1.5)
    assert step_seconds(events, skip=0) == pytest.approx(17 / 4)
    assert step_seconds([line(10, seconds=30.0)], skip=0) == pytest.approx(3.0)


@pytest.mark.parametrize(("own", "steps"), [(1.0, 200), (2.0, 100), (0.5, 400), (1.5, 133), (1e6, 1)])
def test_a_dearer_step_is_taken_less_often(own, steps):
    assert equal_steps(200, baseline=1.0, own=own) == steps
    assert abs(steps * own - 200) <= own / 2 or steps == 1


def test_time_left_goes_by_the_arm_and_by_the_mean_where_there_is_none():
    assert seconds_left({}, ["a"]) is None
    assert seconds_left({"a": [10.0, 20.0]}, ["a", "a"]) == 30.0
    assert seconds_left({"a": [10.0], "b": [30.0]}, ["b", "c"]) == 50.0
    assert seconds_left({"a": [10.0]}, []) == 0
