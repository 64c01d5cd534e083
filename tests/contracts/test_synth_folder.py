"""A folder of synth: one writer at a time, and whatever is damaged in it is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.test_synth import write
from paceline.errors import ConfigError, DataError
from paceline.store.files import Claim


def test_two_synths_into_one_folder_are_not_both_let_in(tmp_path: Path) -> None:
    rows = write(tmp_path / "out", 10)
    with Claim(tmp_path / "out"), pytest.raises(ConfigError, match=r"another process writes to .*out; wait for it"):
        write(tmp_path / "out", 60)
    assert write(tmp_path / "out", 10) == rows


@pytest.mark.parametrize("content", ["", "{", "3", "[1]", "\0"])
def test_a_torn_synth_json_is_one_line(tmp_path: Path, content: str) -> None:
    write(tmp_path / "out", 10)
    (tmp_path / "out" / "synth.json").write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"synth\.json: not the settings of a run") as caught:
        write(tmp_path / "out", 60)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["garbage", "3", "{}", '{"index": 1, "messages": [], "reason": []}', "[]"])
@pytest.mark.parametrize("name", ["rows.jsonl", "dropped.jsonl"])
def test_garbage_is_named_by_file_and_line(tmp_path: Path, name: str, line: str) -> None:
    write(tmp_path / "out", 10)
    path = tmp_path / "out" / name
    whole = path.read_text("utf-8")
    path.write_text(line + "\n" + whole, "utf-8")
    if name == "dropped.jsonl" and "reason" in line:
        return  # a drop, as it happens
    with pytest.raises(DataError, match=rf"{name}:1: found .* remove that line and run again") as caught:
        write(tmp_path / "out", 60)
    assert "\n" not in str(caught.value)
    path.write_text(whole, "utf-8")
    write(tmp_path / "out", 60)
