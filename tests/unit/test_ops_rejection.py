"""The rule's pieces by hand, its guards, and its greedy limit; tests/exact proves the law."""

import pytest
import torch

from paceline.ops import rejection, sampling


def law(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def token(index):
    return torch.tensor(index)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def child_step(p, *, q, token):
    """What one child comes to: the chance to keep it, and both laws for the next sibling."""
    return rejection.accept_probability(p, q=q, token=token), *rejection.after_rejection(p, q=q, token=token)


def test_accept_probability_by_hand():
    p, q = law(0.5, 0.3, 0.2, 0.0), law(0.25, 0.6, 0.0, 0.15)
    assert [rejection.accept_probability(p, q=q, token=token(x)).item() for x in (0, 1, 3)] == [1.0, 0.5, 0.0]
    assert [rejection.accept_probability(p, q=None, token=token(x)).item() for x in range(4)] == [0.5, 0.3, 0.2, 0.0]


def test_residual_by_hand():
    p, q = law(0.5, 0.3, 0.2), law(0.1, 0.8, 0.1)
    torch.testing.assert_close(rejection.residual(p, q=q, token=token(1)), law(0.8, 0.0, 0.2))
    torch.testing.assert_close(rejection.residual(p, q=None, token=token(1)), law(5 / 7, 0.0, 2 / 7))


def test_a_child_hands_both_laws_to_the_next_sibling():
    p, q = law(0.5, 0.3, 0.2), law(0.1, 0.8, 0.1)
    accept, next_p, next_q = child_step(p, q=q, token=token(1))
    assert accept == pytest.approx(0.375)
    assert next_q is not None
    torch.testing.assert_close(next_p, law(0.8, 0.0, 0.2))
    torch.testing.assert_close(next_q, law(0.5, 0.0, 0.5))
    assert child_step(p, q=None, token=token(1))[2] is None


def test_a_batch_of_laws_is_each_law_by_itself():
    p = sampling.probabilities(torch.randn(5, 9, generator=generator(1)), top_k=5)
    q = sampling.probabilities(torch.randn(5, 9, generator=generator(2)), top_k=4)
    p[2], q[2] = law(1, *[0] * 8), law(1, *[0] * 8)  # a row without any residual among rows that have one
    tokens = torch.tensor([0, 1, 0, 3, 8])
    for draft in (q, None):
        together = child_step(p, q=draft, token=tokens)
        for row in range(5):
            row_q = None if draft is None else draft[row]
            apart = child_step(p[row], q=row_q, token=tokens[row])
            for ours, single in zip(together, apart, strict=True):
                assert (ours is None) == (single is None)
                if ours is not None and single is not None:
                    torch.testing.assert_close(ours[row], single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exhausted_mass_falls_back_inside_the_support_and_never_to_nan(dtype):
    same = law(0.5, 0.25, 0.25, 0.0, dtype=dtype)
    torch.testing.assert_close(rejection.residual(same, q=same, token=token(0)), law(0, 0.5, 0.5, 0, dtype=dtype))
    certain = law(0.0, 1.0, 0.0, 0.0, dtype=dtype)
    for q in (None, certain, same):
        accept, next_p, next_q = child_step(certain, q=q, token=token(1))
        assert accept == 1.0
        assert next_p.equal(certain)
        assert next_q is None or next_q.isfinite().all()
    # The draft's law used up: the last sibling had all that was left.
    assert rejection.without(certain, token=token(1)).equal(certain)
    assert rejection.without(certain, token=token(2)).equal(certain)


def test_tiny_and_impossible_drafts_stay_in_range():
    p = law(1e-30, 1.0, 0.0, dtype=torch.float32)
    q = law(1e-42, 1e-38, 1.0, dtype=torch.float32)
    for x in range(3):
        accept, next_p, next_q = child_step(p, q=q, token=token(x))
        assert next_q is not None
        assert 0.0 <= accept <= 1.0
        assert next_p.isfinite().all()
        assert next_q.isfinite().all()
    assert rejection.accept_probability(p, q=law(0.0, 1.0, 0.0), token=token(2)) == 0.0


def test_the_inputs_are_left_alone():
    p, q = law(0.5, 0.3, 0.2), law(0.1, 0.8, 0.1)
    copies = p.clone(), q.clone()
    rejection.verify_children(p, children=[1, 0, 2], q=q, generator=generator())
    rejection.verify_children(p, children=[1, 0, 2], q=None, generator=generator())
    assert p.equal(copies[0])
    assert q.equal(copies[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_the_limit_of_the_same_rule(dtype, seed):
    logits = torch.randn(12, generator=generator(seed), dtype=dtype)
    best = int(logits.argmax())
    p = sampling.probabilities(logits, temperature=0)
    others = [x for x in range(12) if x != best][:4]
    draft = sampling.probabilities(torch.randn(12, generator=generator(seed + 100), dtype=dtype))
    for q in (None, draft):
        for coins in range(3):
            rolls = generator(coins)
            assert rejection.verify_children(p, children=[*others, best], q=q, generator=rolls) == (4, None)
            assert rejection.verify_children(p, children=[best, *others], q=q, generator=rolls) == (0, None)
            assert rejection.verify_children(p, children=others, q=q, generator=rolls) == (None, best)
            assert rejection.verify_children(p, children=[], q=q, generator=rolls) == (None, best)


def test_a_greedy_draft_against_a_sampling_target_and_the_reverse_stay_finite():
    logits = torch.tensor([1.0, 0.5, -1.0])
    sharp, flat = sampling.probabilities(logits, temperature=0), sampling.probabilities(logits)
    for p, q in ((sharp, flat), (flat, sharp)):
        for coins in range(20):
            kept, drawn = rejection.verify_children(p, children=[0, 1], q=q, generator=generator(coins))
            assert (kept is None) != (drawn is None)
            assert drawn is None or p[drawn] > 0
