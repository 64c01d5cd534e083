"""Each loss against its formula, value and gradient, and at the edges where the formula itself breaks."""

import math

import pytest
import torch

from paceline.ops import losses

RANDOM = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 4, 7, generator=RANDOM, dtype=torch.float64)
TARGET_LOGITS = torch.randn(3, 4, 7, generator=RANDOM, dtype=torch.float64)
TARGET = TARGET_LOGITS.softmax(-1)
LABELS = torch.randint(0, 7, (3, 4), generator=RANDOM)
FILTERED = torch.where(TARGET > 0.1, TARGET, 0.0) / torch.where(TARGET > 0.1, TARGET, 0.0).sum(-1, keepdim=True)


def hybrid(q, p):
    weight = torch.exp(-3.0 * torch.minimum(p, q).sum(-1)).detach()
    return weight * (p * (p / q).log()).sum(-1) + (1 - weight) * 0.5 * (p - q).abs().sum(-1)


# name: (our loss of logits, the formula of q and p); p has no zeros here.
FORMULAS = {
    "cross_entropy": (
        lambda x: losses.cross_entropy(x, labels=LABELS),
        lambda q, p: -q.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1).log(),
    ),
    "soft_cross_entropy": (
        lambda x: losses.soft_cross_entropy(x, target=TARGET),
        lambda q, p: -(p * q.log()).sum(-1),
    ),
    "top_cross_entropy": (
        lambda x: losses.top_cross_entropy(x, target=TARGET, count=3),
        lambda q, p: -(torch.where(p >= p.sort(-1).values[..., -3:-2], p, 0.0) * q.log()).sum(-1),
    ),
    "kl": (lambda x: losses.kl(x, target=TARGET), lambda q, p: (p * (p / q).log()).sum(-1)),
    "reverse_kl": (
        lambda x: losses.reverse_kl(x, target_logits=TARGET_LOGITS),
        lambda q, p: (q * (q / p).log()).sum(-1),
    ),
    "total_variation": (
        lambda x: losses.total_variation(x, target=TARGET),
        lambda q, p: 0.5 * (p - q).abs().sum(-1),
    ),
    "overlap": (lambda x: losses.overlap(x, target=TARGET), lambda q, p: torch.minimum(p, q).sum(-1)),
    "acceptance": (
        lambda x: losses.acceptance(x, target=TARGET),
        lambda q, p: -torch.minimum(p, q).sum(-1).log(),
    ),
    "acceptance_hybrid": (lambda x: losses.acceptance_hybrid(x, target=TARGET, eta=3.0), hybrid),
}


def value_and_gradient(loss, logits):
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad((value * torch.arange(1, 13).view(3, 4)).sum(), leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_are_those_of_the_formula(name):
    ours, formula = FORMULAS[name]
    value, gradient = value_and_gradient(ours, LOGITS)
    expected, expected_gradient = value_and_gradient(lambda x: formula(x.softmax(-1), TARGET), LOGITS)
    assert value.shape == (3, 4)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_narrow_logits_are_computed_in_float32(name):
    value, gradient = value_and_gradient(FORMULAS[name][0], LOGITS.bfloat16())
    exact, _ = value_and_gradient(FORMULAS[name][0], LOGITS.bfloat16().double())
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_huge_logits_stay_finite(name):
    logits = LOGITS.float() * 1e4
    value, gradient = value_and_gradient(FORMULAS[name][0], logits)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_the_softmax_identities_hold():
    q = LOGITS.softmax(-1)
    _, gradient = value_and_gradient(lambda x: losses.soft_cross_entropy(x, target=TARGET), LOGITS)
    torch.testing.assert_close(gradient, (q - TARGET) * torch.arange(1, 13).view(3, 4, 1))
    both = losses.overlap(LOGITS, target=TARGET) + losses.total_variation(LOGITS, target=TARGET)
    torch.testing.assert_close(both, torch.ones(3, 4, dtype=torch.float64))
    entropy = -(TARGET * TARGET.log()).sum(-1)
    ours = losses.soft_cross_entropy(LOGITS, target=TARGET) - entropy
    torch.testing.assert_close(losses.kl(LOGITS, target=TARGET), ours)


def test_equal_laws_have_no_distance():
    assert losses.kl(TARGET_LOGITS, target=TARGET).abs().max() < 1e-12
    assert losses.reverse_kl(TARGET_LOGITS, target_logits=TARGET_LOGITS + 5).abs().max() < 1e-12
    assert losses.total_variation(TARGET_LOGITS, target=TARGET).abs().max() < 1e-12
    assert losses.acceptance(TARGET_LOGITS, target=TARGET).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["soft_cross_entropy", "kl", "total_variation", "overlap", "acceptance"])
def test_tokens_without_mass_and_masked_logits_add_nothing(name):
    loss = getattr(losses, name)
    masked = LOGITS.masked_fill(FILTERED == 0, -torch.inf)
    value, gradient = value_and_gradient(lambda x: loss(x, target=FILTERED), masked)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    for row, column in ((0, 0), (2, 3)):
        kept = FILTERED[row, column] > 0
        alone = loss(LOGITS[row, column, kept], target=FILTERED[row, column, kept])
        torch.testing.assert_close(value[row, column], alone)
    # A filtered target against a full draft: nothing special happens either.
    value, gradient = value_and_gradient(lambda x: loss(x, target=FILTERED), LOGITS)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_reverse_kl_with_tokens_masked_on_both_sides_is_finite_and_outside_the_support_infinite():
    hidden = FILTERED == 0
    masked, masked_target = LOGITS.masked_fill(hidden, -torch.inf), TARGET_LOGITS.masked_fill(hidden, -torch.inf)
    value, gradient = value_and_gradient(lambda x: losses.reverse_kl(x, target_logits=masked_target), masked)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert losses.reverse_kl(LOGITS, target_logits=masked_target).isposinf().all()


def test_acceptance_has_a_gradient_where_the_laws_hardly_meet():
    logits = torch.tensor([200.0, 0.0], requires_grad=True)
    loss = losses.acceptance(logits, target=torch.tensor([0.0, 1.0]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(200.0)
    assert gradient.tolist() == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("name", ["soft_cross_entropy", "kl", "total_variation", "overlap", "acceptance"])
def test_no_gradient_reaches_the_target(name):
    target = TARGET.clone().requires_grad_()
    logits = LOGITS.clone().requires_grad_()
    getattr(losses, name)(logits, target=target).sum().backward()
    assert target.grad is None
    assert logits.grad is not None


def test_the_hybrid_is_kl_for_weak_drafts_and_tv_for_strong_ones():
    assert losses.acceptance_hybrid(LOGITS, target=TARGET, eta=0.0).equal(losses.kl(LOGITS, target=TARGET))
    strong = losses.acceptance_hybrid(LOGITS, target=TARGET, eta=1e4)
    torch.testing.assert_close(strong, losses.total_variation(LOGITS, target=TARGET))


def test_top_cross_entropy_of_three_tokens_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    target = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    expected = -(0.6 * math.log(0.3) + 0.3 * math.log(0.2))  # 0.9 of the mass, not scaled up to 1
    assert losses.top_cross_entropy(logits, target=target, count=2).item() == pytest.approx(expected, rel=1e-12)
    whole = losses.soft_cross_entropy(logits, target=target)
    torch.testing.assert_close(losses.top_cross_entropy(logits, target=target, count=10), whole)


@pytest.mark.parametrize(("share", "top_share"), [(0.1, 1.0), (0.1, 0.0), (0.0, 0.5)])
def test_both_cross_entropies_are_one_to_another_law(share, top_share):
    def apart(x):
        top = losses.top_cross_entropy(x, target=TARGET, count=2)
        return share * losses.soft_cross_entropy(x, target=TARGET) + top_share * top

    law, mass = losses.emphasised(TARGET, count=2, share=share, top_share=top_share)
    torch.testing.assert_close(law.sum(-1), torch.ones(3, 4, dtype=torch.float64))
    joined = value_and_gradient(lambda x: mass * losses.soft_cross_entropy(x, target=law), LOGITS)
    for one, two in zip(joined, value_and_gradient(apart, LOGITS), strict=True):
        torch.testing.assert_close(one, two)


def test_an_emphasis_of_nothing_has_no_mass_and_no_nan():
    law, mass = losses.emphasised(TARGET, count=2, share=0.0, top_share=0.0)
    assert not law.any() and not mass.any()


def test_smooth_l1_of_three_numbers_by_hand():
    estimate = torch.tensor([[0.5, -3.0, 2.0]], requires_grad=True)
    loss = losses.smooth_l1(estimate, target=torch.tensor([[0.0, 0.0, 1.0]], requires_grad=True))
    assert loss.tolist() == pytest.approx([(0.125 + 2.5 + 0.5) / 3])
    (gradient,) = torch.autograd.grad(loss.sum(), estimate)
    assert gradient.flatten().tolist() == pytest.approx([0.5 / 3, -1 / 3, 1 / 3])
    assert losses.smooth_l1(estimate.bfloat16(), target=estimate).dtype == torch.float32
