"""Long work whose output goes to a file says where it stands, how fast and for how long."""

import io

import pytest
from rich.console import Console

from paceline.cli import _progress
from paceline.cli._progress import Bar


def test_a_line_a_minute_where_there_is_no_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Bar(Console(file=out, force_terminal=False, width=200), total=1000, text="tokens", done=400) as bar:
        for done in (430, 460, 490, 2000):
            now[0] += 40.0
            bar.update(done, f"{done} tokens")
    assert out.getvalue().splitlines() == [
        "460 of 1000: 460 tokens, 12 min left",
        "1000 of 1000: 2000 tokens, 0 min left",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    out = io.StringIO()
    with Bar(Console(file=out, force_terminal=True, width=120), total=10, text="rows") as bar:
        bar.update(5, "fast")
    assert "5/10" in out.getvalue() and "fast" in out.getvalue()


@pytest.mark.parametrize("total", [0, 3])
def test_nothing_left_to_do(total):
    out = io.StringIO()
    with Bar(Console(file=out, force_terminal=False), total=total, text="rows", done=total):
        pass
    assert out.getvalue() == ""
