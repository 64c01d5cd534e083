"""The theorems of VSD (arXiv 2602.05774; methods.md 6.1) on laws that are small enough to list every path.

A path has LENGTH tokens of WORDS words.  p and q are random laws of every token given the path so far.
"""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from paceline.ops.path_rules import Split
from paceline.ops.paths import reached

WORDS, LENGTH, LAWS = 3, 3, 200
PATHS = list(product(range(WORDS), repeat=LENGTH))


class Law:
    """A law of paths, by a table for every prefix."""

    def __init__(self, seed: int, *, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables = {
            prefix: (torch.randn(WORDS, generator=generator, dtype=torch.float64) * scale).softmax(dim=-1)
            for depth in range(LENGTH)
            for prefix in product(range(WORDS), repeat=depth)
        }

    def token(self, path: tuple[int, ...], depth: int) -> float:
        return float(self.tables[path[:depth]][path[depth]])

    def paths(self) -> Tensor:
        """[27] float64."""
        chances = [prod(self.token(path, depth) for depth in range(LENGTH)) for path in PATHS]
        return torch.tensor(chances, dtype=torch.float64)


def validity(p: Law, q: Law) -> Tensor:
    """kappa: for each path the chance that all its tokens are accepted."""
    return torch.tensor(
        [prod(min(1.0, p.token(z, k) / q.token(z, k)) for k in range(LENGTH)) for z in PATHS],
        dtype=torch.float64,
    )


def accepted_length(p: Law, q: Law) -> float:
    """E_q[accepted tokens]."""
    total = 0.0
    for path, chance in zip(PATHS, q.paths().tolist(), strict=True):
        run = 1.0
        for depth in range(LENGTH):
            run *= min(1.0, p.token(path, depth) / q.token(path, depth))
            total += chance * run
    return total


def kl(one: Tensor, two: Tensor) -> Tensor:
    return (one * (one / two).log()).sum()


def elbo(law: Tensor, kappa: Tensor, p: Tensor) -> Tensor:
    """E[log kappa] - KL(law || p)."""
    return (law * kappa.log()).sum() - kl(law, p)


def pairs() -> list[tuple[Law, Law]]:
    return [(Law(2 * seed), Law(2 * seed + 1, scale=(0.3, 1.0, 2.0)[seed % 3])) for seed in range(LAWS)]


def test_the_elbo_is_below_the_log_marginal_validity_and_meets_it_only_at_the_path_posterior():
    for p, q in pairs():
        kappa, law = validity(p, q), p.paths()
        marginal = (law * kappa).sum()
        posterior = law * kappa / marginal
        assert elbo(posterior, kappa, law) == pytest.approx(float(marginal.log()), abs=1e-12)
        gap = marginal.log() - elbo(q.paths(), kappa, law)
        assert float(gap) == pytest.approx(float(kl(q.paths(), posterior)), abs=1e-9)  # so >= 0, and 0 only there
        assert float(gap) > 0


def test_theorem_1_the_accepted_length_is_at_least_l_times_the_exponential_of_the_elbo():
    for p, q in pairs():
        kappa = validity(p, q)
        bound = LENGTH * float(elbo(q.paths(), kappa, p.paths()).exp())
        assert accepted_length(p, q) >= LENGTH * float((q.paths() * kappa).sum()) - 1e-12
        assert LENGTH * float((q.paths() * kappa).sum()) >= bound - 1e-12


def test_theorem_2_the_elbo_bounds_tighter_than_kl_alone():
    """KL alone: l exp(-2 KL - sqrt(l KL / 2)).

    E_q[log kappa] = -KL - sum_k E[(log p/q)+], and each of those is at most TV_k <= sqrt(KL_k / 2) (Pinsker), whose sum
    is at most sqrt(l KL / 2).  So what is known from the KL alone is below what the ELBO says, strictly unless p = q.
    """
    for p, q in pairs():
        distance = float(kl(q.paths(), p.paths()))
        by_kl = -2 * distance - (LENGTH * distance / 2) ** 0.5
        assert float(elbo(q.paths(), validity(p, q), p.paths())) > by_kl


def test_theorem_3_the_best_law_of_an_m_step_is_the_posterior_of_its_e_step():
    for p, q in pairs()[:40]:
        kappa = validity(p, q)
        posterior = p.paths() * kappa / (p.paths() * kappa).sum()
        logits = posterior.log().requires_grad_()
        loss = -(posterior * logits.log_softmax(dim=-1)).sum()
        (slope,) = torch.autograd.grad(loss, logits)
        assert float(slope.abs().max()) < 1e-12
        others = torch.randn(20, len(PATHS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert all(-(posterior * (posterior.log() + other).log_softmax(-1)).sum() >= loss - 1e-12 for other in others)


def test_em_never_lowers_the_likelihood_of_validity():
    for p, q in pairs():
        kappa, law, before = validity(p, q), q.paths(), -float("inf")
        for _ in range(5):
            now = float((law * kappa).sum().log())
            assert now >= before - 1e-12
            before = now
            law = law * kappa / (law * kappa).sum()  # E-step and, with a free law, M-step
        assert before > float((q.paths() * kappa).sum().log())


def test_speculative_sampling_can_be_drawn_backwards_from_what_was_emitted():
    """(proposal, emitted token): z ~ q, kept with min(1, p/q), else x ~ (p - q)+; backwards z = x with min(1, q/p)."""
    for p, q in pairs():
        one, two = p.tables[()], q.tables[()]
        split = Split.of(one[None], two[None])
        kept, corrected, refused = split.kept[0], split.corrected[0], split.refused[0]
        rejection = float(1 - kept.sum())
        forwards = torch.diag(two * torch.minimum(one / two, torch.ones(WORDS, dtype=torch.float64)))
        forwards += (two - two * (one / two).clamp_max(1))[:, None] * corrected / max(rejection, 1e-300)
        keep = torch.minimum(two / one, torch.ones(WORDS, dtype=torch.float64))
        backwards = torch.diag(one * keep) + refused[:, None] / max(rejection, 1e-300) * (one * (1 - keep))
        assert torch.allclose(forwards, backwards, atol=1e-12)  # [proposal, emitted]
        assert torch.allclose(backwards.sum(0), one, atol=1e-12) and torch.allclose(backwards.sum(1), two, atol=1e-12)


def test_texts_of_the_target_weigh_prefixes_as_the_drafts_own_rounds_do():
    """The mean of a depth's share over texts x ~ p is the chance that a round keeps exactly that prefix."""
    for p, q in pairs()[:50]:
        texts = p.paths()
        chance = torch.tensor(
            [[min(1.0, q.token(x, k) / p.token(x, k)) for x in PATHS] for k in range(LENGTH)], dtype=torch.float64
        )
        _, kept = reached(chance, goes_on=torch.ones(LENGTH, len(PATHS), dtype=torch.bool))
        for depth in range(LENGTH):
            for prefix in product(range(WORDS), repeat=depth + 1):
                here = torch.tensor([path[: depth + 1] == prefix for path in PATHS])
                direct = prod(min(p.token(prefix, k), q.token(prefix, k)) for k in range(depth + 1))
                assert float((texts * kept[depth])[here].sum()) == pytest.approx(direct, abs=1e-12)
