"""Shares of paths by depth against paths that are listed one by one."""

from itertools import product

import pytest
import torch

from paceline.ops.paths import control_coefficient, reached, worth

ACCEPT = torch.tensor([[0.5, 0.9], [0.25, 0.8], [0.75, 0.6]], dtype=torch.float64)  # [K, n]
GOES_ON = torch.tensor([[True, True], [True, True], [True, False]])


def listed(row: int) -> list[tuple[float, int, int | None]]:
    """(chance, accepted tokens, depth of the rejection or None) of every path of a row."""
    found = []
    depths = int(GOES_ON[:, row].sum())
    for coins in product([True, False], repeat=depths):
        kept = coins.index(False) if False in coins else depths
        if any(coins[kept + 1 :]):
            continue  # what comes behind a rejection is not drawn
        chance = 1.0
        for depth, coin in enumerate(coins[: kept + 1]):
            chance *= float(ACCEPT[depth, row]) if coin else 1 - float(ACCEPT[depth, row])
        found.append((chance, kept, kept if kept < depths else None))
    return found


def test_shares_are_those_of_the_listed_paths():
    alive, accepted = reached(ACCEPT, goes_on=GOES_ON)
    for row, depth in product(range(2), range(3)):
        paths = listed(row)
        leads_here = bool(GOES_ON[depth, row])
        assert alive[depth, row] == pytest.approx(sum(c for c, kept, _ in paths if kept >= depth) if leads_here else 0)
        assert accepted[depth, row] == pytest.approx(sum(c for c, kept, _ in paths if kept > depth))


@pytest.mark.parametrize("utility", ["none", "length", "remaining"])
def test_worth_is_the_mean_over_the_listed_paths_that_are_accepted_at_a_depth(utility):
    alive, accepted = reached(ACCEPT, goes_on=GOES_ON)
    found = worth(alive, accepted, utility=utility)
    for row, depth in product(range(2), range(3)):
        through = [(chance, kept) for chance, kept, _ in listed(row) if kept > depth]
        if not through:
            assert found[depth, row] == (1 if utility == "none" else 0)
            continue
        start, scale = {"none": (-1, 0), "length": (0, 1 / 3), "remaining": (depth, 1 / 3)}[utility]
        value = {kept: (kept - start) * scale if scale else 1.0 for _, kept in through}
        mean = sum(chance * value[kept] for chance, kept in through) / sum(chance for chance, _ in through)
        assert found[depth, row] == pytest.approx(mean)


def test_what_remains_weighs_the_gradient_of_the_accepted_length():
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    chance = logits.sigmoid()
    length = chance.cumprod(0).sum() / 3
    (slope,) = torch.autograd.grad(length, logits, retain_graph=True)
    with torch.no_grad():
        alive, accepted = reached(chance[:, None], goes_on=torch.ones(3, 1, dtype=torch.bool))
        weight = accepted * worth(alive, accepted, utility="remaining")
    (found,) = torch.autograd.grad((weight[:, 0] * chance.log()).sum(), logits)
    assert torch.allclose(found, slope, atol=1e-12)


def test_the_control_coefficient_is_cut_and_scaled():
    assert control_coefficient(-3.0, 2.0, reliability=0.5) == 0.5
    assert control_coefficient(1.0, 2.0, reliability=0.5) == 0.0
    assert control_coefficient(-1.0, 2.0, reliability=0.5) == 0.25
    assert control_coefficient(0.0, 0.0, reliability=0.3) == 0.3


def test_the_control_coefficient_makes_the_sum_vary_least():
    generator = torch.Generator().manual_seed(0)
    rejected = torch.rand(500, generator=generator, dtype=torch.float64)
    accepted = 1 - 0.6 * rejected + 0.2 * torch.rand(500, generator=generator, dtype=torch.float64)
    both = torch.stack([accepted, rejected]).cov(correction=0)
    best = control_coefficient(float(both[0, 1]), float(both[1, 1]), reliability=1.0)
    spread = {c: float((accepted + c * rejected).var()) for c in (best - 0.1, best, best + 0.1, 0.0, 1.0)}
    assert 0 < best < 1
    assert min(spread, key=spread.__getitem__) == best
