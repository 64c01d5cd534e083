"""Batches: every row once, little padding, and an order that follows from seed, epoch and position."""

import random

import pytest

from paceline.data.batching import padding_share, plan_epoch
from paceline.errors import ConfigError, DataError

RANDOM = random.Random(0)
LENGTHS = {
    "uniform": [RANDOM.randint(20, 512) for _ in range(500)],
    "skewed": [min(512, int(RANDOM.lognormvariate(4.5, 1.0)) + 5) for _ in range(500)],
    "two lengths": [10] * 50 + [512] * 50,
    "few": [5, 100, 7, 512, 30],
    "equal": [64] * 33,
    "one": [9],
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("max_rows", [None, 4])
def test_every_row_once_within_the_budget_and_with_little_padding(name, max_rows):
    lengths = LENGTHS[name]
    batches = plan_epoch(lengths, epoch=0, seed=1, max_tokens=2048, max_rows=max_rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[index] for index in batch) <= 2048
        assert max_rows is None or len(batch) <= max_rows
        assert padding_share(lengths, batches=[batch]) <= 0.08
    assert padding_share(lengths, batches=batches) < 0.10


def test_batches_are_filled():
    """Few batches are closed early: a plan of single rows would keep the padding at nothing, and waste the machine."""
    lengths = LENGTHS["uniform"]
    batches = plan_epoch(lengths, epoch=0, seed=1, max_tokens=2048)
    assert len(batches) <= 1.25 * sum(lengths) / 2048
    equal = plan_epoch(LENGTHS["equal"], epoch=0, seed=1, max_tokens=640)
    assert sorted(map(len, equal)) == [3, 10, 10, 10]


def test_the_order_follows_from_seed_and_epoch_and_resumes_at_a_position():
    lengths = LENGTHS["skewed"]
    plans = [plan_epoch(lengths, epoch=epoch, seed=7, max_tokens=2048) for epoch in range(3)]
    assert plans[1] == plan_epoch(list(lengths), epoch=1, seed=7, max_tokens=2048)
    assert len(set(plans)) == 3
    assert plan_epoch(lengths, epoch=0, seed=8, max_tokens=2048) != plans[0]
    assert {len(plan) for plan in plans} == {len(plans[0])}, "every epoch has the same number of steps"
    assert len({frozenset(map(frozenset, plan)) for plan in plans}) == 3, "rows of equal length change places"
    longest = [max(lengths[index] for index in batch) for batch in plans[0]]
    assert longest not in (sorted(longest), sorted(longest, reverse=True)), "not from long to short"


def test_the_plan_is_the_same_on_every_machine():
    assert plan_epoch([3, 5, 5, 4, 9], epoch=2, seed=0, max_tokens=10) == ((2, 1), (4,), (3,), (0,))


def test_what_cannot_be_batched_is_named():
    with pytest.raises(ConfigError, match="a row of 9 tokens exceeds a batch of 8"):
        plan_epoch([9], epoch=0, seed=0, max_tokens=8)
    with pytest.raises(DataError, match="no rows"):
        plan_epoch([], epoch=0, seed=0, max_tokens=8)
