"""The schedule's values at the points that a person would check by hand."""

import itertools
import math

import pytest

from paceline.training.schedule import peak_share


def rates(total, warmup, *, min_ratio=0.1):
    return [peak_share(step, total=total, warmup=warmup, min_ratio=min_ratio) for step in range(total)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates(10, 4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_the_cosine_ends_with_the_run():
    found = rates(11, 2)
    assert found[2] == 1.0
    assert found[-1] == pytest.approx(0.1, rel=1e-12)
    assert found[6] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert all(one > two for one, two in itertools.pairwise(found[2:]))


@pytest.mark.parametrize("warmup", [20, 500])
def test_a_warm_up_longer_than_the_run_never_reaches_the_cosine(warmup):
    found = rates(20, warmup)
    assert found[-1] == 20 / warmup
    assert found == sorted(found)


def test_one_step_and_no_warm_up():
    assert rates(1, 0) == [pytest.approx(0.1)]
    assert rates(3, 0)[0] == 1.0
    assert rates(5, 1, min_ratio=1.0) == [1.0] * 5
