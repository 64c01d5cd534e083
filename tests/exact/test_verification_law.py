"""What a round emits follows the target's law: proved by enumerating every tree, coin and draw, not by counting.

Each case is one round of the production rule over a whole proposal, continued with the target's own law; the law of
all emitted sequences is compared with the target's. Wrong rules go through the same enumerator and must be caught.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exact.enumeration import outcomes
from paceline.ops import rejection, sampling, tree

# A shape is the tuple of its children's shapes; it never depends on what was drawn.
LEAF = ()
SHAPES = {
    "empty": LEAF,
    "chain of 3": (((LEAF,),),),
    "3 siblings": (LEAF, LEAF, LEAF),
    "2 by 2": ((LEAF, LEAF), (LEAF, LEAF)),
    "uneven": (((LEAF,),), (LEAF,)),
    "uneven, 3 siblings": (LEAF, ((LEAF, LEAF),), (LEAF,)),
}


class Laws:
    """A random law over sequences: logits for every prefix, behind the usual filters."""

    def __init__(self, seed: int, *, vocabulary: int, like: "Laws | None" = None, only: tuple = (), **filters) -> None:
        self.seed, self.vocabulary, self.like, self.only, self.filters = seed, vocabulary, like, only, filters
        self.known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        code = 1
        for token in prefix:
            code = code * self.vocabulary + token
        random = torch.Generator().manual_seed(1000 * self.seed + code)
        logits = 1.5 * torch.randn(self.vocabulary, generator=random, dtype=torch.float64)
        if self.like is not None:
            logits = 0.5 * logits + self.like.logits(prefix)
        if self.only:
            outside = torch.ones(self.vocabulary, dtype=torch.bool)
            outside[list(self.only)] = False
            logits = logits.masked_fill(outside, -torch.inf)
        return logits

    def law(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self.known:
            self.known[prefix] = sampling.probabilities(self.logits(prefix), **self.filters)
        return self.known[prefix]

    def joint(self, prefix: tuple[int, ...], *, length: int) -> Tensor:
        """[V] * length: the law of the next tokens."""
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        tails = [self.joint((*prefix, token), length=length - 1) for token in range(self.vocabulary)]
        return torch.stack([chance * tail for chance, tail in zip(self.law(prefix), tails, strict=True)])


def height(shape: tuple) -> int:
    return max((1 + height(child) for child in shape), default=0)


class Proposal:
    """A tree of children in order, node by node (a node is named by its path of tokens).

    A subtree that the walk does not enter is independent of the walk, so it may be drawn when it is entered (`grow` on
    demand) or with the whole tree (`grow_all`); the enumeration is the same, only larger.
    """

    def __init__(self, shape: tuple, *, draft: Laws, is_drawn: bool) -> None:
        self.draft, self.is_drawn = draft, is_drawn
        self.shapes: dict[tuple[int, ...], tuple] = {(): shape}
        self.children: dict[tuple[int, ...], list[int]] = {}

    def grow(self, node: tuple[int, ...]) -> list[int]:
        if node not in self.children:
            law, shape = self.draft.law(node), self.shapes.get(node, LEAF)
            if self.is_drawn:
                tokens = sampling.draw_without_replacement(law, count=len(shape), generator=torch.Generator()).tolist()
            else:
                tokens = law.sort(descending=True, stable=True).indices[: len(shape)].tolist()
            self.children[node] = [token for token in tokens if token >= 0]
            self.shapes |= {(*node, token): below for token, below in zip(self.children[node], shape, strict=False)}
        return self.children[node]

    def grow_all(self, node: tuple[int, ...] = ()) -> None:
        for token in self.grow(node):
            self.grow_all((*node, token))


def verify(proposal: Proposal, *, target: Laws, draft: Laws | None) -> tuple[int, ...]:
    """Walk down from the root; returns the emitted tokens."""
    prefix: tuple[int, ...] = ()
    while True:
        children = proposal.grow(prefix)
        q = draft.law(prefix) if draft is not None else None
        index, drawn = rejection.verify_children(
            target.law(prefix), children=children, q=q, generator=torch.Generator()
        )
        if index is None:
            assert drawn is not None
            return (*prefix, drawn)
        prefix = (*prefix, children[index])


Round = Callable[[], tuple[int, ...]]


def emitted_law(one_round: Round, *, target: Laws, length: int) -> tuple[Tensor, float]:
    """The law of the next `length` tokens, [V] * length, and the number of tokens that a round emits on average."""
    law = torch.zeros([target.vocabulary] * length, dtype=torch.float64)
    total = mean = 0.0
    for emitted, chance in outcomes(one_round):
        law[emitted] += chance * target.joint(emitted, length=length - len(emitted))
        total += chance
        mean += chance * len(emitted)
    assert abs(total - 1.0) < 1e-12
    return law, mean


def assert_lossless(one_round: Round, *, target: Laws, length: int) -> float:
    law, mean = emitted_law(one_round, target=target, length=length)
    exact = target.joint((), length=length)
    for kept in range(1, length + 1):  # the first token, the pair, ..., the whole sequence
        rest = list(range(kept, length))
        ours, theirs = (law.sum(rest), exact.sum(rest)) if rest else (law, exact)
        assert (ours - theirs).abs().max() < 1e-12
        assert (ours[theirs == 0] == 0).all()
    return mean


def round_of(shape: tuple, *, kind: str, target: Laws, draft: Laws, whole: bool = False) -> Round:
    """kind: ranked, sampled, or certain (drawn, but verified as if the draft had been certain: exact, only slower)."""

    def one_round() -> tuple[int, ...]:
        proposal = Proposal(shape, draft=draft, is_drawn=kind != "ranked")
        if whole:
            proposal.grow_all()
        return verify(proposal, target=target, draft=draft if kind == "sampled" else None)

    return one_round


def related(seed: int, vocabulary: int, *, target: dict | None = None, draft: dict | None = None) -> tuple[Laws, Laws]:
    p = Laws(seed, vocabulary=vocabulary, **(target or {}))
    return p, Laws(seed + 50, vocabulary=vocabulary, like=p, **(draft or {}))


CASES = {
    "plain": related(1, 3),
    "T = 0.7": related(2, 3, target={"temperature": 0.7}, draft={"temperature": 0.7}),
    "top-k 2 of both": related(3, 4, target={"top_k": 2}, draft={"top_k": 2}),
    "top-p 0.8 of the target only": related(4, 3, target={"top_p": 0.8}),
    "reduced draft vocabulary": related(5, 4, draft={"only": (0, 2)}),
    "greedy target": related(6, 3, target={"temperature": 0.0}),
    "greedy draft": related(7, 4, draft={"temperature": 0.0}),
    "both greedy": related(8, 4, target={"temperature": 0.0}, draft={"temperature": 0.0}),
    "no token in common": (Laws(9, vocabulary=4, only=(0, 1)), Laws(10, vocabulary=4, only=(2, 3))),
    "draft equals target": (Laws(11, vocabulary=3), Laws(11, vocabulary=3)),
}


@pytest.mark.parametrize("kind", ["ranked", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_every_shape_emits_the_law_of_the_target(name, kind):
    target, draft = CASES[name]
    for shape in SHAPES.values():
        one_round = round_of(shape, kind=kind, target=target, draft=draft)
        assert_lossless(one_round, target=target, length=height(shape) + 1)


@pytest.mark.parametrize("name", CASES)
def test_drawn_children_verified_as_if_certain_are_exact_too(name):
    target, draft = CASES[name]
    for shape in ((((LEAF,),),), ((LEAF,), LEAF)):
        one_round = round_of(shape, kind="certain", target=target, draft=draft)
        assert_lossless(one_round, target=target, length=height(shape) + 1)


@pytest.mark.parametrize("shape", ["chain of 3", "2 by 2", "uneven"])
def test_every_whole_tree_that_can_be_drawn(shape):
    target, draft = CASES["plain"]
    one_round = round_of(SHAPES[shape], kind="sampled", target=target, draft=draft, whole=True)
    assert_lossless(one_round, target=target, length=height(SHAPES[shape]) + 1)


@pytest.mark.parametrize("kind", ["ranked", "sampled"])
@pytest.mark.parametrize("seed", [20, 21])
def test_a_vocabulary_of_five_and_unrelated_drafts(seed, kind):
    target, draft = Laws(seed, vocabulary=5), Laws(seed + 100, vocabulary=5)
    for shape in ("chain of 3", "3 siblings"):
        one_round = round_of(SHAPES[shape], kind=kind, target=target, draft=draft)
        assert_lossless(one_round, target=target, length=height(SHAPES[shape]) + 1)


def test_the_enumerator_branches_on_every_row_of_a_batch_of_draws():
    laws = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64)
    law = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    draws = outcomes(lambda: sampling.draw_without_replacement(laws, count=2, generator=torch.Generator()).tolist())
    for ((a, b), (c, d)), chance in draws:
        law[a, b, c, d] += chance
    assert law[1, 0, 2, 0] == 0.75 * 0.5
    assert law[0, 1, 0, 2] == 0.25 * 0.5
    assert law.sum() == 1.0


def test_how_often_one_level_accepts_is_the_closed_form():
    target, draft = related(1, 4)
    p, q = target.law(()), draft.law(())
    means = {
        kind: assert_lossless(round_of((LEAF,), kind=kind, target=target, draft=draft), target=target, length=2) - 1
        for kind in ("ranked", "sampled", "certain")
    }
    assert means["ranked"] == pytest.approx(p[q.argmax()].item(), abs=1e-12)
    assert means["sampled"] == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-12)
    assert means["certain"] == pytest.approx((p * q).sum().item(), abs=1e-12)
    two = round_of((LEAF, LEAF), kind="ranked", target=target, draft=draft)
    assert assert_lossless(two, target=target, length=2) - 1 == pytest.approx(p[q.topk(2).indices].sum().item())


def test_growing_below_the_better_draw_is_exact():
    # Where a drawn tree grows may depend on what was drawn, as long as no drawn sibling is dropped.
    target, draft = related(1, 3)

    def one_round() -> tuple[int, ...]:
        proposal = Proposal((LEAF, LEAF), draft=draft, is_drawn=True)
        best = max(proposal.grow(()), key=lambda token: draft.law(())[token])
        proposal.shapes[(best,)] = (LEAF,)
        return verify(proposal, target=target, draft=draft)

    assert_lossless(one_round, target=target, length=3)


# Wrong rules, as (chance to keep the child, next p, next q); the faults are those of acceptance.md, "Samples needed
# for K15".
ACCEPT, AFTER = rejection.accept_probability, rejection.after_rejection


def right(p, *, q, token):
    return ACCEPT(p, q=q, token=token), *AFTER(p, q=q, token=token)


def accept_if_larger(p, *, q, token):
    return (p[token] >= q[token]).double(), *right(p, q=q, token=token)[1:]


def resample_from_p(p, *, q, token):
    accept, _, next_q = right(p, q=q, token=token)
    return accept, p, next_q


def keep_the_sibling_in_q(p, *, q, token):
    return *right(p, q=q, token=token)[:2], q


def accept_with_p_alone(p, *, q, token):
    return p[token], *right(p, q=q, token=token)[1:]


MUTANTS = [
    (accept_if_larger, "sampled", (LEAF,)),
    (resample_from_p, "sampled", (LEAF,)),
    (resample_from_p, "ranked", (LEAF,)),
    (resample_from_p, "ranked", (LEAF, LEAF)),
    (keep_the_sibling_in_q, "sampled", (LEAF, LEAF)),
    (accept_with_p_alone, "sampled", (LEAF,)),
]


def distance(one_round: Round, *, target: Laws, length: int) -> float:
    law, _ = emitted_law(one_round, target=target, length=length)
    return 0.5 * (law - target.joint((), length=length)).abs().sum().item()


@pytest.mark.parametrize(("rule", "kind", "shape"), MUTANTS)
# On these laws a second sibling matters: more than one token is left once the first has been rejected.
@pytest.mark.parametrize("seed", [3, 9, 33])
def test_a_wrong_rule_is_caught(monkeypatch, rule, kind, shape, seed):
    target, draft = Laws(seed, vocabulary=4), Laws(seed + 50, vocabulary=4)
    one_round = round_of(shape, kind=kind, target=target, draft=draft)
    assert distance(one_round, target=target, length=2) < 1e-12
    monkeypatch.setattr(rejection, "accept_probability", lambda *args, **laws: rule(*args, **laws)[0])
    monkeypatch.setattr(rejection, "after_rejection", lambda *args, **laws: rule(*args, **laws)[1:])
    assert distance(one_round, target=target, length=2) > 1e-3


VERIFIED_WITH = {
    "greedy verification at T = 1": ({}, {"temperature": 0.0}),
    "target T = 0.7 not applied": ({"temperature": 0.7}, {}),
    "target top-k not applied": ({"top_k": 2}, {}),
    "target top-p not applied": ({"top_p": 0.6}, {}),
}


@pytest.mark.parametrize("kind", ["ranked", "sampled"])
@pytest.mark.parametrize("name", VERIFIED_WITH)
def test_verifying_under_other_filters_than_asked_for_is_caught(name, kind):
    asked, used = VERIFIED_WITH[name]
    target, draft = related(3, 4, target=asked)
    wrong = Laws(target.seed, vocabulary=4, **used)
    one_round = round_of((LEAF, LEAF), kind=kind, target=wrong, draft=draft)
    assert distance(one_round, target=target, length=2) > 1e-2


def test_a_ratio_against_another_law_than_the_draws_came_from_is_caught():
    target, draft = related(2, 4)
    drawn_from = Laws(draft.seed, vocabulary=4, like=target, temperature=0.7)
    for is_drawn in (True, False):  # the draft's temperature forgotten in the ratio; a ranked child with a full q

        def one_round(is_drawn: bool = is_drawn) -> tuple[int, ...]:
            return verify(Proposal((LEAF,), draft=drawn_from, is_drawn=is_drawn), target=target, draft=draft)

        assert distance(one_round, target=target, length=2) > 1e-2


@pytest.mark.parametrize("fault", ["drop by score", "sort by score"])
def test_dropping_or_sorting_drawn_siblings_by_their_values_is_caught(fault):
    target, draft = related(1, 4)

    def one_round() -> tuple[int, ...]:
        proposal = Proposal((LEAF, LEAF), draft=draft, is_drawn=True)
        drawn = proposal.grow(())
        scores = draft.law(()).log()[drawn].tolist()
        budget = 2 if fault == "drop by score" else 3
        kept = tree.best_nodes([-1, 0, 0], scores=[0.0, *scores], tokens=[0, *drawn], budget=budget)
        proposal.children[()] = [drawn[index - 1] for index in kept[1:]]
        return verify(proposal, target=target, draft=draft)

    assert distance(one_round, target=target, length=2) > 1e-3
