"""Windows: every row once an epoch, nobody twice, the same for the same seed, and one number says where a run is."""

import math

import pytest

from paceline.config import TrainingSection
from paceline.training.plan import RunPlan, Windows, hold_out

LENGTHS = tuple(5 + (7 * index) % 23 for index in range(41))


def plan_of(*, accumulation=3, world=1, seed=0, **length):
    training = TrainingSection(tokens_per_batch=60, accumulation=accumulation, seed=seed, **(length or {"steps": 9}))
    return RunPlan(LENGTHS, training, world=world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_once_in_an_epoch(world):
    plan = plan_of(world=world)
    windows = Windows(plan)
    assert plan.steps_per_epoch == math.ceil(plan.batches_per_epoch / (3 * world))
    for epoch in (0, 1):
        seen = [
            index
            for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
            for rank in range(world)
            for batch in windows.at(step, rank=rank)
            for index in batch
        ]
        assert sorted(seen) == list(range(len(LENGTHS)))


def test_two_processes_see_what_one_sees_with_twice_the_accumulation():
    one, two = Windows(plan_of(accumulation=6)), Windows(plan_of(accumulation=3, world=2))
    for step in range(12):
        shared = sorted(batch for rank in (0, 1) for batch in two.at(step, rank=rank))
        assert shared == sorted(one.at(step, rank=0))


def test_a_window_depends_on_its_step_and_the_seed_alone():
    forward, backward = Windows(plan_of()), Windows(plan_of())
    steps = range(14)
    seen = {step: forward.at(step, rank=0) for step in steps}
    assert seen == {step: backward.at(step, rank=0) for step in reversed(steps)}
    other = Windows(plan_of(seed=1))
    assert any(other.at(step, rank=0) != seen[step] for step in steps)


@pytest.mark.parametrize(("epochs", "share"), [(1, 1.0), (2.5, 2.5), (0.01, 0.0)])
def test_epochs_to_steps(epochs, share):
    plan = plan_of(epochs=epochs)
    assert plan.steps == max(1, math.ceil(share * plan.steps_per_epoch))


def test_a_tenth_is_held_out_by_digest():
    digests = [f"{index * 7919 % 100:03d}" for index in range(100)]
    held = hold_out(digests, at_most=64)
    assert held == {f"{index:03d}" for index in range(10)} == hold_out(sorted(digests), at_most=64)
    assert len(hold_out(digests, at_most=4)) == 4
    assert hold_out(digests[:9], at_most=64) == set()
