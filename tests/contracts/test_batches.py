"""Acceptance 28 (K20, K21): a row gets in a batch what it gets alone, wherever it stands and whatever others do."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import paceline
from fixtures_blocks import tiny_dflash
from fixtures_decoding import CHAIN, SAMPLED_CHAIN, SAMPLED_TREE, TREE, new_tokens, plain, trips
from fixtures_drafts import tiny_eagle3
from fixtures_models import make_target, tiny_llama, tiny_mistral
from paceline.decoding.loop import Commit
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import UnsupportedOption
from paceline.targets.generic import Target

LENGTHS = (3, 5, 9, 14)
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1)]
TOKENS = 20
DRAFTS = (
    "none", "pattern, chain", "ngram, tree", "eagle3, tree", "eagle3, sampled chain", "eagle3, sampled tree",
    "small eagle3, sampled tree", "dflash, tree", "small dflash, sampled tree",
)  # fmt: skip


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.cache
def target(window: bool = False) -> Target:
    return make_target(tiny_mistral() if window else tiny_llama(layers=2))


@functools.cache
def end() -> int:
    """A token that ends row 1 early and no other row at the same place."""
    return new_tokens(target().model, rows()[1], max_new_tokens=TOKENS)[4]


@functools.cache
def drafts() -> dict[str, Any]:
    whole = [prompt + new_tokens(target().model, prompt, max_new_tokens=TOKENS) for prompt in rows()]
    eagle, small = tiny_eagle3(target()), tiny_eagle3(target(), words=5)
    block, few = tiny_dflash(target()), tiny_dflash(target(), words=5)
    pairs = [
        (None, CHAIN), (trips(whole), CHAIN), (Ngram(NgramConfig()), TREE), (eagle, TREE), (eagle, SAMPLED_CHAIN),
        (eagle, SAMPLED_TREE), (small, SAMPLED_TREE), (block, TREE), (few, SAMPLED_TREE),
    ]  # fmt: skip
    return dict(zip(DRAFTS, pairs, strict=True))


def options_for(sampling: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    ends = [end(), *((21, 33, 40) if sampling else ())]
    return {"max_new_tokens": TOKENS, "eos_token_id": ends, "pad_token_id": 0, **dict(sampling)}


@functools.cache
def alone(draft: str, sampling: tuple[tuple[str, Any], ...]) -> list[list[int]]:
    made, plan = drafts()[draft]
    options = options_for(sampling)
    results = [
        paceline.generate(target(), prompt, draft=made, plan=plan, seed=10 + index, **options)
        for index, prompt in enumerate(rows())
    ]
    return [result.rows[0].tokens for result in results]


@pytest.mark.parametrize("sampling", [(), (("temperature", 1.0),), (("temperature", 0.7), ("top_k", 6))], ids=str)
@pytest.mark.parametrize("draft", DRAFTS)
def test_each_row_equals_its_batch_of_one(draft: str, sampling: tuple[tuple[str, Any], ...]) -> None:
    made, plan = drafts()[draft]
    options = options_for(sampling)
    want = alone(draft, sampling)
    assert len({len(tokens) for tokens in want}) > 1, "one row is to end early"
    committed: dict[int, list[int]] = {}
    ended: set[int] = set()

    def watch(commit: Commit) -> None:
        assert commit.row not in ended, "a finished row went on"
        committed.setdefault(commit.row, []).extend(commit.tokens)
        ended.update({commit.row} if commit.is_last else set())

    result = paceline.generate(target(), rows(), draft=made, plan=plan, seed=10, on_commit=watch, **options)
    assert [row.tokens for row in result.rows] == want
    assert [committed[index] for index in range(4)] == want
    assert ended == {0, 1, 2, 3}


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("draft", DRAFTS)
def test_order_does_not_matter(draft: str, order: tuple[int, ...]) -> None:
    made, plan = drafts()[draft]
    want = alone(draft, ())
    shuffled = [rows()[index] for index in order]
    result = paceline.generate(
        target(), shuffled, draft=made, plan=plan, max_new_tokens=TOKENS, eos_token_id=end(), pad_token_id=0
    )
    assert [row.tokens for row in result.rows] == [want[index] for index in order]


def test_a_seed_is_a_rows_own() -> None:
    made, plan = drafts()["eagle3, sampled tree"]
    prompt = rows()[2]
    options = {"temperature": 1.0, "max_new_tokens": TOKENS}
    batch = paceline.generate(target(), [prompt] * 3, draft=made, plan=plan, seed=4, **options)
    one = [paceline.generate(target(), prompt, draft=made, plan=plan, seed=4 + i, **options).rows[0] for i in range(3)]
    assert [row.tokens for row in batch.rows] == [row.tokens for row in one]
    assert len({tuple(row.tokens) for row in batch.rows}) == 3


def test_streams_side_by_side_do_not_mix_taps() -> None:
    """Two generations that take turns on one target, one of which reads taps and one of which does not."""
    made, plan = drafts()["eagle3, tree"]
    prompts = rows()[1:3]
    want = [paceline.generate(target(), prompt, draft=made, plan=plan, max_new_tokens=TOKENS) for prompt in prompts]
    one = paceline.generate_stream(target(), prompts[0], draft=made, plan=plan, max_new_tokens=TOKENS)
    two = paceline.generate_stream(target(), prompts[1], max_new_tokens=TOKENS)
    heard: dict[str, list[int]] = {"one": [], "two": []}
    rounds = 0
    for commit in one:
        heard["one"] += commit.tokens
        rounds += 1
        heard["two"] += next(two).tokens
    heard["two"] += [token for commit in two for token in commit.tokens]
    assert heard == {"one": want[0].rows[0].tokens, "two": want[1].rows[0].tokens}
    assert rounds == want[0].stats.total.rounds + 1


def test_taps_that_somebody_else_chose_stay_as_they_are() -> None:
    made, plan = drafts()["eagle3, tree"]
    own = make_target(tiny_llama(layers=2), taps=(1, 1))
    for _commit in paceline.generate_stream(own, rows()[1], draft=made, plan=plan, max_new_tokens=TOKENS):
        assert own.taps == (1, 1)
    assert own.taps == (1, 1)


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3"])
def test_a_window_of_8_is_crossed(draft: str) -> None:
    prompt = rows()[1] + [7]
    want = new_tokens(target(True).model, prompt, max_new_tokens=TOKENS)
    made = {"none": None, "ngram": Ngram(NgramConfig()), "eagle3": tiny_eagle3(target(True))}[draft]
    for plan in (CHAIN, TREE):
        result = paceline.generate(target(True), [prompt, rows()[3]], draft=made, plan=plan, max_new_tokens=TOKENS)
        assert result.rows[0].tokens == want


def test_a_returned_cache_is_not_continued_in_silence() -> None:
    prompt = rows()[1]
    before = plain(target().model, prompt, do_sample=False, max_new_tokens=4)
    cache = before.cache if "cache" in before else before.past_key_values
    name = "cache" if "cache" in before else "past_key_values"
    with pytest.raises(UnsupportedOption, match=name):
        target().model.generate(
            before.sequences, max_new_tokens=3, custom_generate=paceline.speculative(None), **{name: cache}
        )
