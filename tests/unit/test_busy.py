"""A busy machine: what others take is told in one line, what we take ourselves is not."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import _busy
from paceline.machine import CpuTimes, cores_of_others, cpu_times


def warned(monkeypatch, *, others, threads):
    """What is printed when, in ten seconds, other processes use so many cores and ours one."""
    moments = iter([CpuTimes(0.0, 100.0, 5.0), CpuTimes(10.0, 100.0 + 10 * (others + 1), 15.0)])
    monkeypatch.setattr(_busy, "cpu_times", lambda: next(moments))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    out = io.StringIO()
    with _busy.busy_warning(Console(file=out, width=80, soft_wrap=True), threads=threads):
        pass
    return out.getvalue()


@pytest.mark.parametrize(("others", "threads", "is_told"), [(0.9, 2, True), (0.9, 1, False), (1.5, 1, True)])
def test_fewer_free_cores_than_threads_are_told(others, threads, is_told, monkeypatch):
    said = warned(monkeypatch, others=others, threads=threads)
    assert (f"warning: other processes kept {others} of 2 cores busy" in said) == is_told
    assert said.count("\n") == is_told


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_an_idle_machine_is_not_told_busy(threads, monkeypatch):
    assert warned(monkeypatch, others=0.1, threads=threads) == ""


def test_a_system_that_does_not_say_is_not_told_busy(monkeypatch):
    monkeypatch.setattr(_busy, "cpu_times", lambda: None)
    out = io.StringIO()
    with _busy.busy_warning(Console(file=out), threads=2):
        pass
    assert out.getvalue() == ""


def test_times_of_the_processor_grow_with_work():
    before = cpu_times()
    sum(range(3_000_000))
    after = cpu_times()
    if before is not None and after is not None:
        assert after.ours > before.ours and after.everybody >= before.everybody
        assert cores_of_others(before, after) >= 0


@pytest.mark.parametrize("text", ["", "cpu", "cpu  1 2 3", "cpu  a b c d e f g h", "intr 5"])
def test_a_system_that_tells_something_else_ends_no_run(monkeypatch, text):
    monkeypatch.setattr(Path, "read_text", lambda self, *_: text)
    assert cpu_times() is None
