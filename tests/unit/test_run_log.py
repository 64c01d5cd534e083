"""The log of a run: averages weighted right, lines that a resume replaces, and what a tracker is told."""

import json

import pytest

from paceline.errors import DataError
from paceline.training.log import LOG, Meter, RunLog, read_log


def test_averages_are_weighted_by_their_denominators():
    one, two = Meter(), Meter()
    one.add_ratio("loss", numerator=6.0, denominator=2.0)
    one.add_ratio("loss", numerator=1.0, denominator=8.0)
    one.add_ratio("nothing", numerator=0.0, denominator=0.0)
    two.add_ratio("loss", numerator=3.0, denominator=10.0)
    two.add_count("tokens", 7)
    one.merge(two.values())
    assert one.averages() == {"loss": 0.5, "nothing": None}
    assert Meter(json.loads(json.dumps(one.values()))).values() == one.values()
    assert one.counts == {"tokens": 7}


def test_a_resumed_log_reads_like_one_run(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.write("train", step=step, values={"loss": 1.0 / step})
    with (tmp_path / LOG).open("a") as file:
        file.write('{"event": "tra')  # torn by a kill
    log = RunLog(tmp_path, keep_until=2)
    log.write("train", step=3, values={"loss": None})
    assert [(event["step"], event["loss"]) for event in read_log(tmp_path / LOG)] == [(1, 1.0), (2, 0.5), (3, None)]
    RunLog(tmp_path)
    assert read_log(tmp_path / LOG) == []


def test_a_tracker_is_told_the_numbers(tmp_path):
    told = []
    log = RunLog(tmp_path, track=lambda values, step: told.append((values, step)))
    log.write("train", step=4, values={"loss": 0.5, "epoch": 1, "note": "text", "none": None})
    assert told == [({"train/loss": 0.5, "train/epoch": 1.0}, 4)]


@pytest.mark.parametrize("text", ["", "\n", "not json\n"])
def test_a_log_without_a_line(tmp_path, text):
    (tmp_path / LOG).write_text(text)
    assert read_log(tmp_path / LOG) == []


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"step": "1"}', "not json"])
def test_a_line_that_is_no_event_is_named_at_resume(tmp_path, line):
    (tmp_path / LOG).write_text(f'{line}\n{{"event": "train", "step": 1}}\n')
    with pytest.raises(DataError, match=r"log\.jsonl: line 1: found .*, expected an event with its step"):
        RunLog(tmp_path, keep_until=5)
