"""What a slot counts for, by hand on three slots."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.ops import slots

ALL = torch.ones(1, 3, dtype=torch.bool)


def test_decay_by_hand() -> None:
    assert slots.decaying(ALL, gamma=2.0)[0].tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.0)])
    active = torch.tensor([[True, True, False]])
    assert slots.decaying(active, gamma=2.0)[0].tolist() == pytest.approx([1.0, math.exp(-0.5), 0.0])
    assert slots.even(active)[0].tolist() == [1.0, 1.0, 0.0]


def test_pace_by_hand() -> None:
    chance = torch.tensor([[0.8, 0.4, 0.0]])
    # s = 0.9, 0.7, 0.5 with alpha = 0.5; P = 0.9, 0.63, 0.315
    found = slots.pace(chance, active=ALL, alpha=0.5)[0].tolist()
    assert found == pytest.approx([0.9 + 0.63 + 0.315, 0.63 + 0.315, 0.315])
    active = torch.tensor([[True, True, False]])
    assert slots.pace(chance, active=active, alpha=0.5)[0].tolist() == pytest.approx([0.9 + 0.63, 0.63, 0.0])
    assert slots.pace(chance, active=ALL, alpha=0.0)[0].tolist() == pytest.approx([0.8 + 0.32, 0.32, 0.0])


def test_pace_is_the_slope_of_the_smoothed_length_and_has_none_itself() -> None:
    logs = torch.tensor([[0.8, 0.4, 0.3]]).log().requires_grad_()
    logs.cumsum(dim=1).exp().sum().backward()
    weights = slots.pace(logs.exp(), active=ALL, alpha=0.0)
    assert logs.grad is not None and torch.allclose(weights, logs.grad)
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([1, 0, 1], [1, 1, 0]),
        ([0, 1, 1], [1, 0, 0]),
        ([1, 1, 0], [1, 1, 1]),
    ],
)
def test_until_failure_by_hand(hits: list[int], expected: list[int]) -> None:
    assert slots.until_failure(torch.tensor([hits]).bool(), active=ALL)[0].tolist() == expected


def test_until_failure_stops_where_supervision_does() -> None:
    active = torch.tensor([[True, False, False]])
    assert slots.until_failure(ALL, active=active)[0].tolist() == [1, 0, 0]
