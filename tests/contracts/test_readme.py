"""The README's Python runs as it stands: only the target behind its names is a tiny one.

The target answers nothing but a turn opened by the chat template, so that a snippet which forgets it fails here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures_chat import save_chat_draft, save_target
from house.source import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall((ROOT / "README.md").read_text("utf-8"))
SNIPPETS = [code for language, code in BLOCKS if language == "python"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine as the README supposes it: smollm2 fetched, its draft shipped, a run in run/, and a folder MODEL."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.shipped.ROOT", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "cache" / "targets" / "smollm2-wheel")
    save_chat_draft(tmp_path / "shipped" / "smollm2-eagle3")
    save_chat_draft(tmp_path / "run" / "best")
    save_target(tmp_path / "MODEL")


def texts(names: dict[str, Any]) -> list[str]:
    """What a snippet has written, in its `result` or its `output`; a draft changes none of it."""
    if "result" in names:
        return [row.text for row in names["result"].rows]
    inputs, output = names["inputs"], names["output"]
    plain = names["model"].generate(**inputs, max_new_tokens=64)
    assert output.tolist() == plain.tolist()
    return names["tokenizer"].batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_runs_as_it_stands_and_writes_something(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # our own document
    written = texts(names)
    assert written and all(text.strip() for text in written)


def test_every_door_is_shown_and_nothing_is_left_unrun() -> None:
    shown = "".join(SNIPPETS)
    for door in ("load_target", "load_draft", "generate", "speculative"):
        assert f"paceline.{door}(" in shown
    assert not [code for language, code in BLOCKS if "import paceline" in code and language != "python"]
