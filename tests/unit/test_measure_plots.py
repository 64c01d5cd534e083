"""Pictures: the record's figures reach the drawing; without matplotlib one line says so before anything runs."""

from unittest.mock import MagicMock

import pytest

from fixtures_plots import stand_in
from paceline.errors import ConfigError
from paceline.measure import plots

RECORD = {
    "plan": "chain of 2, ranked", "n": 4, "tokens_per_s_plain": 20.0, "tokens_per_s_plain_se": 0.5,
    "tokens_per_s_draft": 35.0, "tokens_per_s_draft_se": None, "other_plans": [],
    "baselines": {"hf": {"tokens_per_s": 18.0, "tokens_per_s_se": 0.4}},
    "acceptance_by_depth": [
        {"depth": 1, "conditional": 0.7, "conditional_se": 0.02, "cumulative": 0.7, "cumulative_se": 0.02},
        {"depth": 2, "conditional": None, "conditional_se": None, "cumulative": 0.4, "cumulative_se": 0.03},
    ],
}  # fmt: skip


@pytest.fixture
def axes(monkeypatch) -> MagicMock:
    return stand_in(monkeypatch)


def test_figures_of_the_record_are_drawn(axes, tmp_path):
    written = plots.draw(RECORD, folder=tmp_path / "new", name="core")
    assert [path.name for path in written] == [
        "core-speed.png", "core-speed.svg", "core-acceptance.png", "core-acceptance.svg",
    ]  # fmt: skip
    assert [path.read_text() for path in written] == ["png", "svg"] * 2
    labels, values = axes.bar.call_args.args
    assert labels == ["plain", "chain of 2,\nranked", "hf"]
    assert values == [20.0, 35.0, 18.0]
    assert axes.bar.call_args.kwargs["yerr"] == [0.5, 0.0, 0.4]
    assert [call.args for call in axes.errorbar.call_args_list] == [([1, 2], [0.7, 0.0]), ([1, 2], [0.7, 0.4])]


def test_a_plain_record_has_no_picture_of_acceptance(axes, tmp_path):
    axes.bar.return_value = [MagicMock()]
    record = {**RECORD, "plan": None, "acceptance_by_depth": [], "baselines": {}}
    assert [path.name for path in plots.draw(record, folder=tmp_path, name="x")] == ["x-speed.png", "x-speed.svg"]


def test_without_matplotlib_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--plots needs .* pip install matplotlib$"):
        plots.require_matplotlib()
