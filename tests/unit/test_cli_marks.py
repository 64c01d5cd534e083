"""What the draft wrote stands out on every console: green, or between the marks that `paceline mask` uses."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

import paceline
from fixtures_chat import chat_target
from fixtures_decoding import trips
from paceline.cli._generation import stream
from paceline.cli._marks import CLOSE, OPEN, Marks

MESSAGES = [{"role": "user", "content": "hello"}]
COLOUR: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor"}
PLAIN: dict[str, dict[str, Any]] = {"no terminal": {}, "no colour": {**COLOUR, "no_color": True}}


def shown(*, show: bool, **console: Any) -> str:
    """What `paceline generate` prints with a draft that is right for a while and then wrong."""
    target = chat_target()
    whole = paceline.generate(target, MESSAGES, max_new_tokens=20).rows[0]
    page = io.StringIO()
    stream(
        Console(file=page, highlight=False, soft_wrap=True, **console), target,
        trips([[*whole.prompt, *whole.tokens]]), MESSAGES, plan="chain:3", seed=0, options={"max_new_tokens": 20},
        show=show,
    )  # fmt: skip
    return page.getvalue().split("\n")[0]


def drafted() -> list[tuple[str, bool]]:
    """(text, is the draft's) of each token."""
    target = chat_target()
    whole = paceline.generate(target, MESSAGES, max_new_tokens=20).rows[0]
    again = paceline.generate(
        target, MESSAGES, draft=trips([[*whole.prompt, *whole.tokens]]), plan=paceline.ProposalPlan.chain(3),
        max_new_tokens=20,
    ).rows[0]  # fmt: skip
    texts = [target.tokenizer.decode([token], skip_special_tokens=True) for token in again.tokens]
    return list(zip(texts, again.from_draft, strict=True))


@pytest.mark.parametrize("kind", PLAIN)
def test_without_colour_the_draft_still_stands_out(kind: str) -> None:
    page = shown(show=True, **PLAIN[kind])
    spans = re.findall(r"\{\+(.*?)\+\}|((?:(?!\{\+).)+)", page)
    tokens = drafted()
    assert {True, False} == {flag for _, flag in tokens}
    assert "".join(marked for marked, _ in spans) == "".join(text for text, flag in tokens if flag)
    assert "".join(plain for _, plain in spans) == "".join(text for text, flag in tokens if not flag)
    assert page.count(OPEN) == page.count(CLOSE) > 1 and OPEN + CLOSE not in page and CLOSE + OPEN not in page


def test_colour_needs_no_marks_and_nothing_is_marked_unasked() -> None:
    text = "".join(text for text, _ in drafted())
    coloured = shown(show=True, **COLOUR)
    assert "\x1b[1;32m" in coloured and OPEN not in coloured
    assert shown(show=False) == text


def test_an_open_span_is_closed_at_the_end() -> None:
    marks = Marks(Console(file=io.StringIO()))
    pieces = [marks.piece("a", is_marked=False), marks.piece("", is_marked=True), marks.piece("b", is_marked=True)]
    pieces += [marks.piece("", is_marked=False), marks.piece("c", is_marked=True), marks.end(), marks.end()]
    assert "".join(piece.plain for piece in pieces) == "a{+bc+}"
