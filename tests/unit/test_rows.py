"""Rows: every rule accepts or skips by name and line number, and nothing ends in a traceback."""

import gzip
import json
import lzma

import pytest

from paceline.data.rows import Row, Skip, iter_rows, parse_row, read_rows
from paceline.errors import DataError

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"function": {"name": "weather", "arguments": {"city": "rome"}}}
TOOL = {"role": "tool", "content": ""}


def chat(*messages, **rest):
    return {"messages": list(messages), **rest}


REFUSED = [
    ([], "not an object: found an empty list"),
    ("text", "not an object"),
    ({}, "expected exactly one of"),
    ({"messages": [USER], "turns": ["hi"]}, "expected exactly one of"),
    (chat(), "empty conversation"),
    ({"messages": None}, "empty conversation: messages is null"),
    (chat(ANSWER, USER), "first turn is not the user's"),
    (chat({"role": "system", "content": "s"}, ANSWER), "first turn is not the user's"),
    (chat({"role": "system", "content": "s"}), "empty conversation: only a system turn"),
    (chat(USER, ANSWER, {"role": "system", "content": "s"}), "system turn that is not first"),
    (chat(USER, USER, ANSWER), "two user turns in a row: turns 1 and 2"),
    (chat(USER, ANSWER, ANSWER), "two assistant turns in a row"),
    (chat(USER, {"role": "assistant", "content": None}), "content is not text: turn of assistant holds null"),
    (chat({"role": "user", "content": None}, ANSWER), "content is not text: turn of user"),
    (chat({"role": "user"}, ANSWER), "content is not text"),
    (chat(USER, {"role": "assistant", "content": " \n"}), "empty content: turn of assistant"),
    (chat(USER, {"role": "assistant", "content": None, "tool_calls": []}), "content is not text"),
    (
        chat({"role": "user", "content": [{"type": "image", "image": "x"}]}, ANSWER),
        "content with parts other than text",
    ),
    (chat({"role": "critic", "content": "x"}), "unknown role: 'critic'"),
    (chat("hi"), "a turn is not an object"),
    (chat(USER, TOOL), "tool turn without a tool call before it"),
    (chat(USER, {**ANSWER, "tool_calls": [CALL]}, TOOL, USER), "user turn right after a tool turn"),
    (chat({**USER, "tool_calls": [CALL]}), "tool calls in a turn of user"),
    (
        chat(USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        "tool arguments are not JSON",
    ),
    (
        chat(USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}),
        "tool arguments are not an",
    ),
    (chat(USER, {**ANSWER, "tool_calls": [{"arguments": {}}]}), "a tool call without a function name"),
    (chat(USER, ANSWER, tools={"a": 1}), "tools must be a list"),
    ({"turns": ["hi", 3]}, "content is not text"),
    ({"text": "hi"}, "expected exactly one of messages, conversations, turns, prompt: found text"),
    (
        {"prompt": [USER]},
        "expected exactly one of messages, conversations, turns, prompt: found prompt, which is a list",
    ),
    ({"prompt": " "}, "empty content: turn of user"),
    ({"conversations": [{"from": "gpt", "value": "yes"}]}, "first turn is not the user's"),
    ({"conversations": [{"from": "narrator", "value": "yes"}]}, "unknown role: 'narrator'"),
]


@pytest.mark.parametrize(("record", "reason"), REFUSED)
def test_refused_rows_name_the_rule(record, reason):
    with pytest.raises(DataError) as error:
        parse_row(record, source="x")
    assert str(error.value).startswith(reason)
    assert "\n" not in str(error.value)


def test_tool_arguments_as_object_or_as_json_text_are_one_row():
    as_object = chat(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOOL, TOOL, ANSWER)
    text_call = {"type": "function", "function": {"name": "weather", "arguments": '{"city":"rome"}'}}
    flat_call = {"name": "weather", "arguments": {"city": "rome"}}
    rows = [
        parse_row(as_object, source="x"),
        *(
            parse_row(
                chat(USER, {"role": "assistant", "content": "", "tool_calls": [call]}, TOOL, TOOL, ANSWER), source="x"
            )
            for call in (text_call, flat_call)
        ),
    ]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "rome"}
    assert rows[0].messages[1]["content"] == ""


def test_the_three_forms_mean_the_same():
    system = {"role": "system", "content": "be kind"}
    plain = parse_row(chat({**system, "role": "developer"}, USER, ANSWER, category="c", seed=3), source="x")
    turns = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    sharegpt = parse_row({"conversations": turns, "category": "c", "seed": 3}, source="x")
    assert plain == sharegpt == Row((system, USER, ANSWER), ("hi",), None, "c", "x", {"seed": 3})
    asked = parse_row({"turns": ["hi", "and then"], "question_id": 7}, source="x")
    assert asked == Row((USER,), ("hi", "and then"), None, "", "x", {"question_id": 7})
    parts = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    assert parse_row(chat(parts, {**ANSWER, "weight": 1}), source="x").messages == (USER, {**ANSWER, "weight": 1})


def test_a_prompt_alone_is_one_user_turn_and_beside_a_conversation_a_key_like_any_other():
    asked = parse_row({"prompt": "hi", "id": 7}, source="x")
    assert asked == parse_row({"turns": ["hi"], "id": 7}, source="x")
    both = parse_row(chat(USER, ANSWER, prompt="hi"), source="x")
    assert (both.messages, both.fields) == ((USER, ANSWER), {"prompt": "hi"})


def test_sharegpt_function_call_becomes_a_tool_call():
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "yes"},
    ]
    messages = parse_row({"conversations": turns}, source="x").messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", **CALL}]


LINES = [
    b"\xef\xbb\xbf" + json.dumps(chat(USER, ANSWER)).encode() + b"\r\n",
    b"\r\n",
    b"[]\r\n",
    b'{"messages": [\r\n',
    b'{"turns": ["caf\xe9"]}\n',
    b'{"turns": ["\\ud800"]}\n',
    b"[" * 100_000 + b"\n",
    '{"turns": ["caf\u00e9\u2028 still one line"]}'.encode(),
]


@pytest.mark.parametrize(("name", "opener"), [("a.jsonl", open), ("a.jsonl.gz", gzip.open), ("a.jsonl.xz", lzma.open)])
def test_lines_are_counted_through_bom_crlf_and_breakage(tmp_path, name, opener):
    path = tmp_path / name
    with opener(path, "wb") as file:
        file.write(b"".join(LINES))
    entries = list(iter_rows(path))
    lines = [int(entry.source.rpartition(":")[2]) for entry in entries]
    assert lines == [1, 3, 4, 5, 6, 7, 8]
    assert [isinstance(entry, Row) for entry in entries] == [True, False, False, False, False, False, True]
    reasons = [entry.reason.split(":")[0] for entry in entries if isinstance(entry, Skip)]
    assert reasons == ["not an object", "not JSON", "not UTF-8", "not Unicode text", "not JSON"]
    assert entries[-1].turns == ("caf\u00e9\u2028 still one line",)
    reading = read_rows(path)
    assert reading.summary() == (
        "2 rows accepted, 5 skipped (2 x not JSON, 1 x not an object, 1 x not UTF-8, 1 x not Unicode text)"
    )
    assert len(read_rows([path, path], limit=3).rows) == 3


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf\r\n\n", b"[]\n", b"{}\n"])
def test_a_file_without_a_usable_row_is_one_error(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"no usable row in .*a.jsonl.*expected one JSON object per line"):
        read_rows(path)


@pytest.mark.parametrize("kind", ["missing", "folder", "torn.gz", "torn.xz", "plain.gz"])
def test_unreadable_files_are_named(tmp_path, kind):
    path = tmp_path / kind
    content = b"".join(json.dumps(chat(USER, {**ANSWER, "content": str(i) * 50})).encode() + b"\n" for i in range(99))
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        packed = {"torn.gz": gzip.compress(content), "torn.xz": lzma.compress(content), "plain.gz": content}[kind]
        path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=f"cannot read .*{kind}"):
        read_rows(path)
