"""Prompt sources: files and the Hub give the same prompts; a missing package is one clear line."""

import json
import sys

import pytest

from fixtures_hub import fake_datasets
from paceline.data.prompt_sources import PromptReading, open_sources
from paceline.data.prompt_sources import read_prompts as read_source
from paceline.errors import ConfigError, DataError


def read_prompts(source, *, limit: int | None = None) -> PromptReading:
    return read_source(*open_sources([source]), limit=limit)


def test_a_prompt_ends_at_the_first_user_turn(tmp_path):
    path = tmp_path / "rows.jsonl"
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    chat = [system, user, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path.write_text("\n".join(map(json.dumps, [{"messages": chat, "category": "x"}, {"turns": ["a", "c"]}, {}])))
    reading = read_prompts(path)
    first, second = reading.prompts
    assert (first.messages, first.follow_ups, first.category) == ((system, user), ("c",), "x")
    assert (second.messages, second.follow_ups, second.source) == ((user,), ("c",), "rows.jsonl:2")
    assert [skip.source for skip in reading.skips] == ["rows.jsonl:3"]
    assert len(read_prompts(path, limit=1).prompts) == 1


def test_hub_rows_obey_the_same_rules(monkeypatch):
    records = [{"question": "a", "category": "x"}, {"question": None}, {"question": "b"}]
    asked = fake_datasets(monkeypatch, records)
    reading = read_prompts("hub:me/set?split=test&column=question&config=main")
    assert asked == {"name": "me/set", "config": "main", "split": "test", "revision": "c0ffee", "streaming": True}
    label = "hub:me/set?column=question&config=main&split=test"
    assert [(prompt.messages[0]["content"], prompt.source) for prompt in reading.prompts] == [
        ("a", f"{label}:1"),
        ("b", f"{label}:3"),
    ]
    assert [skip.source for skip in reading.skips] == [f"{label}:2"]
    assert len(read_prompts("hub:me/set?column=question", limit=1).prompts) == 1
    with pytest.raises(DataError, match=r"no column answer.*column="):
        read_prompts("hub:me/set?column=answer")
    with pytest.raises(ConfigError, match="unknown slit"):
        read_prompts("hub:me/set?slit=test")
    with pytest.raises(ConfigError, match="'//me/set' is no name"):
        read_prompts("hub://me/set")
    with pytest.raises(DataError, match=r"no column messages, conversations, turns, prompt: found category, question"):
        read_prompts("hub:me/set")
    with pytest.raises(DataError, match=r"hub:me/set\?column=question is given twice"):
        open_sources(["hub:me/set?column=question"] * 2)


def test_a_data_set_is_read_at_the_commit_that_identifies_it(monkeypatch):
    asked = fake_datasets(monkeypatch, [{"prompt": "a", "made": object()}])
    (newest,) = open_sources(["hub:me/set"])
    (pinned,) = open_sources(["hub:me/set?revision=beef"])
    assert (newest.label, newest.digest) == ("hub:me/set", "c0ffee")
    assert (pinned.label, pinned.digest) == ("hub:me/set", "beef")
    assert read_source(pinned).prompts[0].messages[0]["content"] == "a"
    assert asked["revision"] == "beef"


def test_a_turn_that_json_cannot_hold_is_skipped(monkeypatch):
    turn = {"role": "user", "content": "a"}
    fake_datasets(monkeypatch, [{"messages": [turn]}, {"messages": [{**turn, "at": object()}]}])
    reading = read_prompts("hub:me/set")
    assert len(reading.prompts) == 1 and reading.skips[0].reason.startswith("not JSON: ")


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install datasets"):
        read_prompts("hub:me/set")


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no route\nto host")

    for missing in ("load_dataset", "load_dataset_builder"):
        fake_datasets(monkeypatch, [])
        monkeypatch.setattr(sys.modules["datasets"], missing, refuse)
        with pytest.raises(DataError, match="cannot read hub:me/set: no route; check"):
            read_prompts("hub:me/set")
