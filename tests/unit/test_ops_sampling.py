"""Laws against transformers' warpers, draws against the law."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paceline.errors import ConfigError
from paceline.ops import sampling


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def by_transformers(logits, *, temperature, top_k, top_p):
    """The warpers in the order in which generate() applies them, each only where generate() would add it."""
    scores = logits.float() if logits.dtype != torch.float64 else logits
    if temperature != 1.0:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None and top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(dim=-1)


LOGITS = {
    "random": torch.randn(6, 50, generator=generator(1)) * 3,
    "coarse, many ties": torch.randint(-2, 3, (6, 50), generator=generator(2)).float(),
    "all equal": torch.zeros(2, 8),
    "masked": torch.randn(4, 20, generator=generator(3)).masked_fill(torch.arange(20) % 3 == 0, -torch.inf),
    "peaked": torch.randn(4, 20, generator=generator(4)) * 200,
    "quarters": torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125]]).log(),
    "half precision": torch.randn(4, 30, generator=generator(5)).to(torch.bfloat16),
    "double": torch.randn(4, 30, generator=generator(6), dtype=torch.float64),
}


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_the_law_and_its_support_are_those_of_the_warpers(name, temperature):
    logits = LOGITS[name]
    for top_k in (None, 0, 1, 4, 1000):
        for top_p in (None, 0.0, 1e-6, 0.25, 0.5, 0.75, 0.8, 1.0 - 1e-7, 1.0):
            ours = sampling.probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
            theirs = by_transformers(logits, temperature=temperature, top_k=top_k, top_p=top_p)
            assert ours.equal(theirs), (top_k, top_p)


def test_leading_dimensions_do_not_matter():
    logits = torch.randn(2, 3, 40, generator=generator())
    together = sampling.probabilities(logits, temperature=0.8, top_k=9, top_p=0.7)
    apart = torch.stack([sampling.probabilities(x, temperature=0.8, top_k=9, top_p=0.7) for x in logits[1]])
    assert together.shape == logits.shape
    assert together[1].equal(apart)


def test_float64_stays_and_narrower_types_become_float32():
    assert sampling.probabilities(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert sampling.probabilities(torch.zeros(3, dtype=dtype)).dtype == torch.float32
        assert sampling.probabilities(torch.zeros(3, dtype=dtype), temperature=0).dtype == torch.float32


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9.9e-6])
def test_zero_temperature_is_one_hot_at_the_first_largest_logit(temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [-5.0, -torch.inf, -5.0, -7.0], [3e38, -3e38, 0.0, 0.0]])
    probs = sampling.probabilities(logits, temperature=temperature, top_k=3, top_p=0.1)
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_the_smallest_temperature_that_samples_is_finite_and_nearly_one_hot():
    probs = sampling.probabilities(torch.tensor([10.0, 9.0, -30.0]), temperature=1e-5)
    assert probs.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        *(("top_p", value) for value in (-0.1, 1.1, float("nan"))),
        ("top_k", -1),
    ],
)
def test_values_outside_their_range_are_refused_by_name(option, value):
    with pytest.raises(ConfigError, match=f"^{option} is "):
        sampling.probabilities(torch.zeros(3), **{option: value})


def assert_follows(counts, law):
    """Chi-square of observed counts against a law; the bound is its 99.99 % point by Wilson and Hilferty."""
    expected = law * counts.sum()
    assert (counts[law == 0] == 0).all()
    support = law > 0
    statistic = ((counts - expected)[support] ** 2 / expected[support]).sum().item()
    freedom = max(int(support.sum()) - 1, 1)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound


def test_draws_follow_the_law_and_never_leave_its_support():
    law = torch.tensor([0.0, 0.4, 0.0, 0.05, 0.3, 0.25, 0.0])
    tokens = sampling.draw(law.expand(20_000, -1), generator=generator(3))
    assert tokens.dtype == torch.int64
    assert_follows(torch.bincount(tokens, minlength=7).double(), law.double())


def test_a_draw_needs_no_normalisation_and_repeats_with_its_seed():
    law = torch.rand(5, 11, generator=generator())
    first = sampling.draw(law, generator=generator(7))
    assert first.shape == (5,)
    assert first.equal(sampling.draw(law * 0.25, generator=generator(7)))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_stay_in_the_support(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, uniform, dtype=torch.float64))
    for law in ([0.0, 0.1, 0.0, 0.2, 0.0], [0.0, 0.75, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0], [0.3] * 3 + [0.0]):
        probs = torch.tensor(law)
        token = sampling.draw(probs, generator=generator())
        assert probs[token] > 0
        assert sampling.draw(probs.double(), generator=generator()) == token
    for total in torch.linspace(0.001, 4.0, 1999, dtype=torch.float64):
        scaled = torch.tensor([0.0, 0.25, 0.75, 0.0], dtype=torch.float64) * total
        assert scaled[sampling.draw(scaled, generator=generator())] > 0
    assert sampling.draw(torch.tensor([0.0, 0.5, 0.5, 0.0]), generator=generator()) == (1 if uniform < 0.5 else 2)


def test_a_coin_of_chance_zero_never_falls_and_of_chance_one_always_does(monkeypatch):
    for uniform in (0.0, 1.0 - 2**-53):
        monkeypatch.setattr(torch, "rand", lambda shape, u=uniform, **_: torch.full(shape, u, dtype=torch.float64))
        assert not sampling.flip(torch.tensor(0.0), generator=generator())
        assert sampling.flip(torch.tensor(1.0), generator=generator())
    monkeypatch.undo()
    coins = generator(5)
    heads = sum(sampling.flip(torch.tensor(0.3), generator=coins) for _ in range(4000))
    assert abs(heads / 4000 - 0.3) < 0.03


def test_draws_without_replacement_follow_the_sequential_renormalised_law():
    law = torch.tensor([0.5, 0.0, 0.3, 0.2])
    pairs = sampling.draw_without_replacement(law.expand(20_000, -1), count=2, generator=generator(4))
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).double()
    exact = torch.zeros(4, 4, dtype=torch.float64)
    for first in (0, 2, 3):
        for second in (0, 2, 3):
            if first != second:
                exact[first, second] = law[first].double() * law[second].double() / (1 - law[first].double())
    assert_follows(counts, exact.flatten() / exact.sum())


def test_a_used_up_support_yields_minus_one_and_leaves_the_law_alone():
    law = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    before = law.clone()
    tokens = sampling.draw_without_replacement(law, count=3, generator=generator())
    assert law.equal(before)
    assert sorted(tokens[0].tolist()) == [-1, 1, 2]
    assert tokens[1].tolist() == [0, -1, -1]
    assert sorted(tokens[2].tolist()) == [0, 1, 2]
    assert sampling.draw_without_replacement(law, count=0, generator=generator()).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 511, 512, 513, 1024, 5000])
def test_the_first_of_equals_is_best(count, dtype):
    scores = torch.randint(-3, 4, (40, count), generator=generator(7)).to(dtype)
    scores[0] = -torch.inf
    scores[1] = 2.0
    scores[2, -1] = 9.0
    scores[3, count // 2] = torch.nan
    scores[4, 0] = scores[4, -1] = 9.0
    assert torch.equal(sampling.first_best(scores), scores.argmax(dim=-1))
    assert sampling.first_best(scores[:0]).shape == (0,)
