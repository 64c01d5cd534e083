"""Writing TOML: whatever is written reads back equal, and what TOML cannot say is refused by key."""

import tomllib

import pytest

from paceline.errors import ConfigError
from paceline.toml import to_toml

ROUND_TRIPS = [
    {},
    {"a": 1, "b": -2.5, "c": True, "d": "text"},
    {"rate": 1e-05, "huge": 1e300, "whole": 3.0, "third": 1 / 3, "up": float("inf"), "down": float("-inf")},
    {
        "quotes": 'say "hi"',
        "slash": "a\\b",
        "lines": "one\ntwo\r\n\ttab",
        "controls": "\x00\x1f\x7f",
        "wide": "\u00e9\U0001f600",
    },
    {"list": [1, 2], "empty": [], "nested": [["a"], ["b", "c"]], "tables": [{"x": 1}, {"y": {"z": []}}]},
    {"top": 1, "section": {"x": 1, "inner": {"y": "z"}}, "other": {}},
    {"spaced key": 1, "dotted.key": {"caf\u00e9": 2}, "": {"": 3}},
    {"section": {"table": {"a": 1}, "after": 2}},  # the scalar must come before the inner table's header
]


@pytest.mark.parametrize("table", ROUND_TRIPS)
def test_reads_back_equal(table):
    assert tomllib.loads(to_toml(table)) == table


def test_int_and_float_stay_apart():
    table = tomllib.loads(to_toml({"a": 1, "b": 1.0}))
    assert type(table["a"]) is int
    assert type(table["b"]) is float


def test_nan_stays_nan():
    value = tomllib.loads(to_toml({"x": float("nan")}))["x"]
    assert value != value


def test_tuples_are_lists():
    assert tomllib.loads(to_toml({"x": (1, (2, 3))})) == {"x": [1, [2, 3]]}


@pytest.mark.parametrize("value", [None, object(), {1}, b"x"])
def test_refuses_what_toml_cannot_say(value):
    with pytest.raises(ConfigError, match=r"section\.key"):
        to_toml({"section": {"key": value}})


def test_refuses_keys_that_are_not_text():
    with pytest.raises(ConfigError, match="key 3"):
        to_toml({3: 1})
