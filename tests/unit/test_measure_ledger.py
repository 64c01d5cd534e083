"""The side file: a stopped run goes on, a foreign one is refused, a torn line is not believed."""

import errno
from io import FileIO

import pytest

from paceline.errors import ConfigError, DataError
from paceline.measure.ledger import Ledger, Mismatch, Observation, side_file
from paceline.measure.metrics import Measured

SETTINGS = {"seed": 0, "decoders": ("plain", "draft")}


def observation(number: int) -> Observation:
    results = {"plain": Measured(3, 0.5), "draft": Measured(3, 0.25, rounds=2, offered=(2, 1), taken=(1, 0))}
    mismatches = {"draft": Mismatch(1, 5, None, 0.25, 1e-6)} if number == 1 else {}
    return Observation(number, 0, "a.jsonl", number + 1, 7, "digest", results, mismatches)


def begun(path, *numbers: int) -> Ledger:
    ledger = Ledger(path, settings=SETTINGS, resume=False)
    for number in numbers:
        ledger.add(number, [observation(number)])
    ledger.close()
    return ledger


def test_what_was_measured_comes_back(tmp_path):
    path = tmp_path / "new" / "record.json"
    begun(path, 0, 1)
    again = Ledger(path, settings=SETTINGS, resume=True)
    assert again.done == {0: [observation(0)], 1: [observation(1)]}
    assert len(again.sittings) == 2
    again.remove()
    assert not side_file(path).exists()


def test_a_torn_line_is_measured_again(tmp_path):
    path = tmp_path / "record.json"
    begun(path, 0, 1)
    side_file(path).write_bytes(side_file(path).read_bytes()[:-20])
    again = Ledger(path, settings=SETTINGS, resume=True)
    assert list(again.done) == [0]
    again.add(1, [observation(1)])
    again.close()
    third = Ledger(path, settings=SETTINGS, resume=True)
    assert list(third.done) == [0, 1]
    third.close()


def test_measurements_are_not_thrown_away_unasked(tmp_path):
    path = tmp_path / "record.json"
    begun(path, 0, 1)
    with pytest.raises(ConfigError, match=r"record\.json\.partial holds 2 conversations .* --resume"):
        Ledger(path, settings=SETTINGS, resume=False)


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "record.json"
    begun(path, 0)
    with pytest.raises(DataError, match="seed = 0, now 1"):
        Ledger(path, settings={**SETTINGS, "seed": 1}, resume=True)


def test_a_run_that_measured_nothing_leaves_nothing_to_refuse(tmp_path):
    path = tmp_path / "record.json"
    begun(path)
    ledger = Ledger(path, settings={"seed": 5}, resume=False)
    ledger.close()
    assert len(ledger.sittings) == 1


def test_two_benchmarks_of_one_record_are_not_both_let_in(tmp_path):
    path = tmp_path / "record.json"
    first = Ledger(path, settings=SETTINGS, resume=False)
    first.add(0, [observation(0)])
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"another process writes to .*record\.json\.partial"):
            Ledger(path, settings=SETTINGS, resume=resume)
    other = Ledger(tmp_path / "other.json", settings=SETTINGS, resume=False)  # beside it there is room
    other.close()
    first.close()
    again = Ledger(path, settings=SETTINGS, resume=True)
    assert list(again.done) == [0]
    again.close()


@pytest.mark.parametrize("text", ["garbage", "3", "[]", "{}", '{"conversation": 1}', '{"settings": 3}', "\0"])
def test_garbage_in_the_side_file_is_named_by_line(tmp_path, text):
    path = tmp_path / "record.json"
    begun(path, 0)
    number = len(side_file(path).read_text().splitlines()) + 1
    with side_file(path).open("a") as file:
        file.write(text + "\n")
    for resume in (False, True):
        with pytest.raises(DataError, match=rf"record\.json\.partial:{number}: found") as caught:
            Ledger(path, settings=SETTINGS, resume=resume)
        assert "\n" not in str(caught.value)


def test_a_full_disk_names_the_side_file(tmp_path):
    ledger = begun(tmp_path / "record.json", 0)
    ledger._stream = FullDisk(side_file(tmp_path / "record.json"), "a")
    with pytest.raises(OSError, match="No space left on device") as caught:
        ledger.add(1, [observation(1)])
    assert caught.value.filename == str(side_file(tmp_path / "record.json"))
    ledger.close()
    again = Ledger(tmp_path / "record.json", settings=SETTINGS, resume=True)
    assert list(again.done) == [0]  # the torn line is not believed
    again.close()


class FullDisk(FileIO):
    """A file for which there are ten bytes of room."""

    room = 10

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= (written := super().write(memoryview(data)[: self.room]))
        return written
