"""A text is continued as it is; where a chat target ends it at once, one line says how to get an answer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import paceline
from fixtures_chat import ANSWER, chat_target

MESSAGES = [{"role": "user", "content": "hello"}]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "text" in record.getMessage()]


@pytest.mark.parametrize("door", ["generate", "generate_stream", "two prompts"])
def test_an_empty_answer_to_a_bare_text_is_explained_once(door: str, caplog: pytest.LogCaptureFixture) -> None:
    target = chat_target()
    with caplog.at_level(logging.WARNING, logger="paceline"):
        if door == "generate_stream":
            assert [commit.is_last for commit in paceline.generate_stream(target, "hello", max_new_tokens=20)] == [True]
        else:
            prompts = ["hello", "bye"] if door == "two prompts" else "hello"
            assert {row.text for row in paceline.generate(target, prompts, max_new_tokens=20).rows} == {""}
    (line,) = said(caplog)
    assert line.startswith("chat ended a text at once") and "{'role': 'user', 'content': ...}" in line
    assert "\n" not in line


@pytest.mark.parametrize("prompt", [MESSAGES, "so we add", [5]], ids=["messages", "a text that goes on", "token ids"])
def test_nothing_is_said_where_nothing_looks_wrong(prompt: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        paceline.generate(chat_target(), prompt, max_new_tokens=20)
    assert not said(caplog)


def test_nothing_is_said_without_a_chat_template(caplog: pytest.LogCaptureFixture) -> None:
    target = chat_target()
    target.tokenizer.chat_template = None
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert paceline.generate(target, "hello", max_new_tokens=20).rows[0].text == ""
    assert not said(caplog)


def test_messages_get_the_answer() -> None:
    assert paceline.generate(chat_target(), MESSAGES, max_new_tokens=20).rows[0].text == "".join(ANSWER)
