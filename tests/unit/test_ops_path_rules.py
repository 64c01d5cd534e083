"""Rules with slopes of their own against finite differences, and against the losses that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.ops import losses, path_rules
from paceline.ops.fused_losses import CHUNK, head_logits, head_rule

GENERATOR = torch.Generator().manual_seed(3)
ROWS, WORDS = 6, 9
LOGITS = torch.randn(ROWS, WORDS, generator=GENERATOR, dtype=torch.float64) * 2
TARGET_LOGITS = torch.randn(ROWS, WORDS, generator=GENERATOR, dtype=torch.float64) * 2
P = TARGET_LOGITS.softmax(dim=-1)
WEIGHT = torch.rand(ROWS, WORDS, generator=GENERATOR, dtype=torch.float64)

Rule = Callable[[Tensor], tuple[Tensor, Tensor]]
RULES: dict[str, tuple[Rule, Callable[[Tensor], Tensor]]] = {
    "likelihood": (
        lambda log_q: path_rules.weighted_likelihood(log_q, target=WEIGHT),
        lambda logits: losses.soft_cross_entropy(logits, target=WEIGHT),
    ),
    "overconfidence": (
        lambda log_q: path_rules.overconfidence(log_q, weight=WEIGHT),
        lambda logits: losses.overconfidence(logits, weight=WEIGHT),
    ),
    "reverse_kl": (
        lambda log_q: path_rules.reverse_kl(log_q, p=P),
        lambda logits: losses.reverse_kl(logits, target_logits=TARGET_LOGITS),
    ),
    "acceptance": (
        lambda log_q: path_rules.acceptance(log_q, p=P),
        lambda logits: losses.acceptance(logits, target=P),
    ),
    "acceptance_hybrid": (
        lambda log_q: path_rules.acceptance_hybrid(log_q, p=P, eta=3.0),
        lambda logits: losses.acceptance_hybrid(logits, target=P, eta=3.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_slopes_are_those_of_the_twin(name):
    rule, twin = RULES[name]
    logits = LOGITS.clone().requires_grad_()
    slow = twin(logits)
    (expected,) = torch.autograd.grad(slow.sum(), logits)
    fast, slopes = rule(LOGITS.log_softmax(dim=-1))
    assert torch.allclose(fast, slow.detach(), atol=1e-10)
    assert torch.allclose(slopes, expected, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in RULES if name != "acceptance_hybrid"])  # its weight is held fixed
def test_slopes_are_finite_differences(name):
    rule, _ = RULES[name]
    _, slopes = rule(LOGITS.log_softmax(dim=-1))
    step = 1e-6
    for row in range(ROWS):
        for word in range(WORDS):
            near = []
            for sign in (1, -1):
                moved = LOGITS.clone()
                moved[row, word] += sign * step
                near.append(float(rule(moved.log_softmax(dim=-1))[0][row]))
            assert slopes[row, word] == pytest.approx((near[0] - near[1]) / (2 * step), abs=1e-6)


def test_a_law_is_split_into_what_is_kept_corrected_and_refused():
    q = LOGITS.softmax(dim=-1)
    split = path_rules.Split.of(P, q)
    assert torch.allclose(split.kept + split.corrected, P)
    assert torch.allclose(split.kept + split.refused, q)
    assert float((split.corrected * split.refused).max()) == 0


def test_certain_drafts_have_finite_losses_and_slopes():
    log_q = torch.tensor([[0.0, -200.0, -200.0]])
    p = torch.tensor([[0.0, 1.0, 0.0]])
    weight = torch.ones(1, 3)
    for losses_, slopes in (
        path_rules.weighted_likelihood(log_q, target=p),
        path_rules.overconfidence(log_q, weight=weight),
        path_rules.reverse_kl(log_q, p=p),
        path_rules.acceptance(log_q, p=p),
        path_rules.acceptance_hybrid(log_q, p=p, eta=1.0),
    ):
        assert losses_.isfinite().all() and slopes.isfinite().all()


def test_a_rule_behind_a_head_has_the_gradients_of_autograd():
    for rows in (1, CHUNK, CHUNK + 3):
        generator = torch.Generator().manual_seed(rows)
        hidden = torch.randn(rows, 12, generator=generator).requires_grad_()
        weight = torch.randn(30, 12, generator=generator).requires_grad_()
        target = torch.rand(rows, 30, generator=generator)

        def rule(logits: Tensor, part: slice, target: Tensor = target) -> tuple[Tensor, Tensor]:
            return path_rules.weighted_likelihood(logits.log_softmax(dim=-1), target=target[part])

        kept = head_logits(hidden, weight=weight)
        total = head_rule(hidden, weight=weight, rule=rule, logits=kept)
        assert torch.equal(kept, head_logits(hidden, weight=weight))  # a rule may overwrite what it is handed
        assert torch.allclose(total, head_rule(hidden, weight=weight, rule=rule), rtol=1e-6)
        (1.5 * total).backward()
        fast = hidden.grad, weight.grad
        hidden.grad = weight.grad = None
        slow = losses.soft_cross_entropy(hidden @ weight.T, target=target).sum()
        (1.5 * slow).backward()
        assert torch.allclose(total, slow, rtol=1e-5)
        for one, two in zip(fast, (hidden.grad, weight.grad), strict=True):
            assert one is not None and two is not None and torch.allclose(one, two, atol=1e-3, rtol=1e-4)


def test_a_head_under_autocast_multiplies_in_its_dtype_and_returns_float32_gradients():
    hidden = torch.randn(5, 8, generator=GENERATOR).requires_grad_()
    weight = torch.randn(7, 8, generator=GENERATOR).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = head_logits(hidden, weight=weight)
        total = head_rule(hidden, weight=weight, logits=logits, rule=lambda said, _part: (said.sum(-1), said.sin_()))
    total.backward()
    assert logits.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == weight.grad.dtype == torch.float32  # type: ignore[union-attr]
