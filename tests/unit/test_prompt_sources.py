"""Prompt sources: files and the Hub give the same prompts; a missing package is one clear line."""

import json
import sys
from types import SimpleNamespace

import pytest

from paceline.data.prompt_sources import read_prompts
from paceline.errors import ConfigError, DataError


def test_a_prompt_ends_at_the_first_user_turn(tmp_path):
    path = tmp_path / "rows.jsonl"
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    chat = [system, user, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path.write_text("\n".join(map(json.dumps, [{"messages": chat, "category": "x"}, {"turns": ["a", "c"]}, {}])))
    reading = read_prompts(path)
    first, second = reading.prompts
    assert (first.messages, first.follow_ups, first.category) == ((system, user), ("c",), "x")
    assert (second.messages, second.follow_ups, second.source) == ((user,), ("c",), f"{path}:2")
    assert [skip.source for skip in reading.skips] == [f"{path}:3"]
    assert len(read_prompts(path, limit=1).prompts) == 1


def test_hub_rows_obey_the_same_rules(monkeypatch):
    asked = {}

    def load_dataset(name, config, **options):
        asked.update(options, name=name, config=config)
        return iter([{"question": "a", "category": "x"}, {"question": None}, {"question": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    reading = read_prompts("hub:me/set?split=test&column=question&config=main")
    assert asked == {"name": "me/set", "config": "main", "split": "test", "revision": None, "streaming": True}
    assert [(prompt.messages[0]["content"], prompt.source) for prompt in reading.prompts] == [
        ("a", "hub:me/set:1"),
        ("b", "hub:me/set:3"),
    ]
    assert [skip.source for skip in reading.skips] == ["hub:me/set:2"]
    assert len(read_prompts("hub:me/set?column=question", limit=1).prompts) == 1
    with pytest.raises(DataError, match=r"no column answer.*column="):
        read_prompts("hub:me/set?column=answer")
    with pytest.raises(ConfigError, match="unknown slit"):
        read_prompts("hub:me/set?slit=test")


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install datasets"):
        read_prompts("hub:me/set")


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match="cannot read hub:me/set: no route; check"):
        read_prompts("hub:me/set")
