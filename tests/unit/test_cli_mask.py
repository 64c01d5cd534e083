"""The mask viewer: what stands between the marks is exactly what is trained on."""

import json
import sys
from types import SimpleNamespace

import pytest

from fixtures_text import tiny_tokenizer
from paceline.cli.mask import mask


@pytest.mark.parametrize("colour", [False, True])
def test_marks_enclose_the_answers_and_their_end_of_turn(tmp_path, monkeypatch, capsys, colour):
    monkeypatch.setitem(
        sys.modules, "paceline.store.hub", SimpleNamespace(load_tokenizer=lambda target: tiny_tokenizer())
    )
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1") if colour else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    late = [{"role": "user", "content": "a " * 40 + "b"}, turns[1]]
    path.write_text("[]\n" + "\n".join(json.dumps({"messages": messages}) for messages in (turns * 2, late, turns)))
    mask(path, target="tiny", rows=2, max_length=40, thinking=None)
    printed = capsys.readouterr().out
    assert f"{path}:1: skipped: not an object" in printed
    assert f"{path}:3: dropped: answer lost by truncation at 40 tokens" in printed
    assert f"{path}:2: 20 tokens, 4 trained on" in printed
    assert "2 rows accepted, 1 skipped" in printed
    assert f"{path}:4" not in printed
    body = "<bos>user\nhello<eot>\nassistant\n{+yes<eot>+}\nuser\nhello<eot>\nassistant\n{+yes<eot>+}\n"
    if colour:
        assert printed.count("\x1b[1;32myes<eot>\x1b[0m") == 2
        assert "{+" not in printed
    else:
        assert body in printed
        assert "\x1b" not in printed
