"""Acceptance 4-7, 27 (K16-K19, K41): every option acts as in transformers' plain `generate`, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import paceline
from fixtures_decoding import (
    CHAIN,
    SAMPLED_CHAIN,
    SAMPLED_TREE,
    TREE,
    follows,
    new_tokens,
    plain,
    prompts,
    trips,
)
from fixtures_drafts import tiny_eagle3
from fixtures_models import bigram_model, cycle_table, make_target, tiny_llama
from fixtures_text import letters, tiny_tokenizer
from paceline.decoding.api import Generation
from paceline.decoding.plan import ProposalPlan
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import ConfigError, UnsupportedOption
from paceline.targets.generic import Target

PROMPTS = prompts(2)
TOKENS = 12


@functools.cache
def target() -> Target:
    return make_target(tiny_llama(layers=2), tokenizer=tiny_tokenizer())


@functools.cache
def free() -> list[list[int]]:
    """What plain decoding says without any option: the material that options are made of."""
    return [new_tokens(target().model, prompt, max_new_tokens=TOKENS) for prompt in PROMPTS]


class Odd(LogitsProcessor):
    """A processor of the user's own: where it looks depends on the whole path so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 3.0 * ((torch.arange(scores.shape[-1]) + input_ids.sum(dim=-1, keepdim=True)) % 2)


class SumStop(StoppingCriteria):
    """A criterion of the user's own: stops where the sum of all ids is a multiple of 3."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.sum(dim=-1) % 3 == 0


class UnsureStop(StoppingCriteria):
    """Stops at the first token that was not chosen clearly: a criterion that reads the scores."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        best = scores[-1].topk(2, dim=-1).values
        return best[:, 0] - best[:, 1] < 0.7


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "repetition penalty": lambda: {"repetition_penalty": 1.3},
    "no repeated 3-gram": lambda: {"no_repeat_ngram_size": 3},
    "no repeated 1-gram": lambda: {"no_repeat_ngram_size": 1},
    "prompt penalty": lambda: {"encoder_repetition_penalty": 1.8},
    "no 2-gram of the prompt": lambda: {"encoder_no_repeat_ngram_size": 1},
    "end": lambda: {"eos_token_id": free()[0][3], "pad_token_id": 0},
    "several ends": lambda: {"eos_token_id": [free()[0][5], free()[1][2]], "pad_token_id": 0},
    "end comes first": lambda: {"eos_token_id": [free()[0][0], free()[1][0]], "pad_token_id": 0},
    "min_new_tokens": lambda: {"eos_token_id": free()[0][2], "pad_token_id": 0, "min_new_tokens": 7},
    "min_length": lambda: {"eos_token_id": free()[0][2], "pad_token_id": 0, "min_length": 10},
    "bad words": lambda: {"bad_words_ids": [[free()[0][1]], free()[1][2:4]]},
    "suppressed": lambda: {"suppress_tokens": [free()[0][1], free()[1][4]]},
    "suppressed at the beginning": lambda: {"begin_suppress_tokens": [free()[0][0], free()[1][0]]},
    "forced end": lambda: {"forced_eos_token_id": 5},
    "bias": lambda: {"sequence_bias": [[[free()[0][2]], -9.0], [[free()[1][1], 17], 12.0]]},
    "length penalty": lambda: {"exponential_decay_length_penalty": (2, 1.4), "eos_token_id": 9, "pad_token_id": 0},
    "normalised": lambda: {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "guidance": lambda: {"guidance_scale": 1.7},
    "own processor": lambda: {"logits_processor": [Odd()]},
    "own criterion": lambda: {"stopping_criteria": [SumStop()]},
    "criterion on scores": lambda: {"stopping_criteria": [UnsureStop()]},
    "grammar": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: list(range(int(ids[-1]) % 3, 64, 3))},
    "many at once": lambda: {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "logits_processor": [Odd()],
        "eos_token_id": free()[0][6], "pad_token_id": 0, "min_new_tokens": 4,
    },
}  # fmt: skip


@functools.cache
def expected(case: str) -> list[Any]:
    options = {"max_new_tokens": TOKENS, "do_sample": False}
    return [plain(target().model, prompt, **options, **CASES[case]()) for prompt in PROMPTS]


@functools.cache
def drafts(case: str) -> dict[str, Any]:
    texts = [result.sequences[0].tolist() for result in expected(case)]
    return {
        "none": (None, CHAIN),
        "oracle, chain": (follows(texts), CHAIN),
        "pattern, tree": (trips(texts), TREE),
        "ngram, tree": (Ngram(NgramConfig()), TREE),
        "eagle3, chain": (eagle(), CHAIN),
        "eagle3, sampled tree": (eagle(), SAMPLED_TREE),
    }


@functools.cache
def eagle() -> Any:
    return tiny_eagle3(target())


def assert_same(row: Generation, result: Any) -> None:
    prompt = len(row.prompt)
    assert row.tokens == result.sequences[0, prompt:].tolist()
    assert len(row.from_draft) == len(row.tokens)
    assert row.scores is not None and row.logits is not None
    torch.testing.assert_close(row.scores, torch.cat(result.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(row.logits, torch.cat(result.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_option_acts_as_in_plain_generate(case: str) -> None:
    for draft, plan in drafts(case).values():
        result = paceline.generate(
            target(), PROMPTS, draft=draft, plan=plan, max_new_tokens=TOKENS, output_scores=True, output_logits=True,
            **CASES[case](),
        )  # fmt: skip
        for row, plainly in zip(result.rows, expected(case), strict=True):
            assert_same(row, plainly)


def test_the_options_above_change_something() -> None:
    whole = [prompt + text for prompt, text in zip(PROMPTS, free(), strict=True)]
    idle = [case for case in CASES if [result.sequences[0].tolist() for result in expected(case)] == whole]
    assert idle == ["nothing", "no repeated 3-gram", "normalised"]


def test_no_repeated_3_gram_on_a_text_that_repeats() -> None:
    cycle = make_target(bigram_model(cycle_table()))
    options = {"max_new_tokens": 24, "no_repeat_ngram_size": 3}
    want = new_tokens(cycle.model, [0], **options)
    assert want != new_tokens(cycle.model, [0], max_new_tokens=24)
    for draft, plan in [(follows([[0, *want]]), CHAIN), (Ngram(NgramConfig()), TREE), (tiny_eagle3(cycle), TREE)]:
        assert paceline.generate(cycle, [0], draft=draft, plan=plan, **options).rows[0].tokens == want


def test_what_an_oracle_knows_is_accepted_under_processors() -> None:
    draft, plan = drafts("many at once")["oracle, chain"]
    result = paceline.generate(
        target(), PROMPTS, draft=draft, plan=plan, max_new_tokens=TOKENS, **CASES["many at once"]()
    )
    total = result.stats.total
    assert total.accepted >= total.emitted - total.rounds
    assert total.accepted_length > 2.5


def test_forced_first_token() -> None:
    options = {"forced_bos_token_id": 11, "max_new_tokens": 6}
    want = new_tokens(target().model, [3], **options)
    assert want[0] == 11
    for draft in (None, follows([[3, *want]]), eagle()):
        assert paceline.generate(target(), [3], draft=draft, **options).rows[0].tokens == want


def test_a_grammar_may_depend_on_the_place_of_the_prompt() -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return list(range(row, 64, 2))

    result = paceline.generate(target(), PROMPTS, draft=eagle(), max_new_tokens=8, prefix_allowed_tokens_fn=allowed)
    assert [{token % 2 for token in row.tokens} for row in result.rows] == [{0}, {1}]


@pytest.mark.parametrize("place", range(1, 9))
def test_stop_string_completed_inside_an_accepted_block(place: int) -> None:
    tokenizer = letters()
    cycle = make_target(bigram_model(cycle_table()), tokenizer=tokenizer)
    path = new_tokens(cycle.model, [0], max_new_tokens=12)
    one, two = (tokenizer.convert_ids_to_tokens(token) for token in path[place - 1 : place + 1])
    stop = one[-1] + two  # begins inside one token and ends with the next
    options = {"stop_strings": [stop, "never"], "max_new_tokens": 12}
    want = new_tokens(cycle.model, [0], tokenizer=tokenizer, **options)
    assert want == path[: place + 1]
    streamed: list[int] = []
    result = paceline.generate(
        cycle, [0], draft=follows([[0, *path]]), plan=ProposalPlan.chain(8), output_scores=True,
        on_commit=lambda commit: streamed.extend(commit.tokens), **options,
    )  # fmt: skip
    row = result.rows[0]
    assert row.tokens == streamed == want
    assert row.scores is not None and len(row.scores) == len(want)
    assert row.text == tokenizer.decode(want, skip_special_tokens=True)
    assert result.stats.total.emitted == len(want) - 1


def test_stop_strings_of_the_models_own_configuration() -> None:
    model, tokenizer = tiny_llama(layers=2), letters()
    model.generation_config = GenerationConfig(stop_strings=[tokenizer.decode(free()[0][3:5])])
    result = paceline.generate(
        make_target(model, tokenizer=tokenizer), PROMPTS[0], draft=eagle(), max_new_tokens=TOKENS
    )
    assert result.rows[0].tokens == new_tokens(model, PROMPTS[0], max_new_tokens=TOKENS, tokenizer=tokenizer)
    assert len(result.rows[0].tokens) < TOKENS


GREEDY: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1e-6},
    {"temperature": 0.0, "do_sample": True},
    {"temperature": 0.8, "do_sample": False},
    {"do_sample": False, "top_k": 5, "top_p": 0.3, "typical_p": 0.5, "min_p": 0.2},
]


@pytest.mark.parametrize("options", GREEDY, ids=str)
def test_no_temperature_is_greedy_whatever_the_draft_draws(options: dict[str, Any]) -> None:
    for draft, plan in [(None, CHAIN), (eagle(), SAMPLED_CHAIN), (eagle(), SAMPLED_TREE), (eagle(), TREE)]:
        result = paceline.generate(target(), PROMPTS, draft=draft, plan=plan, max_new_tokens=TOKENS, **options)
        assert [row.tokens for row in result.rows] == free()
        assert min(result.stats.total.runs, default=0) >= 0


def test_a_greedy_configuration_of_the_model_is_overruled_only_by_the_caller() -> None:
    model = tiny_llama(layers=2)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=1, top_p=0.9, repetition_penalty=1.3, eos_token_id=63, pad_token_id=0
    )
    own = make_target(model)
    want = [new_tokens(model, prompt, max_new_tokens=TOKENS) for prompt in PROMPTS]
    assert [row.tokens for row in paceline.generate(own, PROMPTS, draft=eagle(), max_new_tokens=TOKENS).rows] == want
    # Sampling asked for by temperature alone: the configuration's top_k of 1 must not make it greedy in silence.
    hot = paceline.generate(own, PROMPTS, draft=eagle(), max_new_tokens=TOKENS, temperature=3.0)
    assert [row.tokens for row in hot.rows] != want
    asked = paceline.generate(own, PROMPTS, draft=eagle(), max_new_tokens=TOKENS, temperature=3.0, top_k=1)
    assert [row.tokens for row in asked.rows] == want


def test_a_given_configuration_says_the_same_as_its_options() -> None:
    fields = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": TOKENS}
    for plan in (SAMPLED_CHAIN, TREE):
        one = paceline.generate(target(), PROMPTS, draft=eagle(), plan=plan, seed=3, **fields)
        two = paceline.generate(
            target(), PROMPTS, draft=eagle(), plan=plan, seed=3, generation_config=GenerationConfig(**fields)
        )
        assert [row.tokens for row in one.rows] == [row.tokens for row in two.rows]
    for fields in ({}, {"do_sample": False, "temperature": 0.7}, {"do_sample": True, "temperature": 1e-7}):
        cold = GenerationConfig(max_new_tokens=TOKENS, **fields)
        result = paceline.generate(target(), PROMPTS, generation_config=cold)
        assert [row.tokens for row in result.rows] == free()
    hot = paceline.generate(
        target(), PROMPTS, generation_config=GenerationConfig(do_sample=True, max_new_tokens=TOKENS)
    )
    assert [row.tokens for row in hot.rows] != free()


def test_several_sequences_of_one_prompt() -> None:
    options = {"temperature": 1.0, "max_new_tokens": 6}
    result = paceline.generate(target(), PROMPTS, draft=eagle(), seed=5, num_return_sequences=2, **options)
    alone = [paceline.generate(target(), PROMPTS[i // 2], draft=eagle(), seed=5 + i, **options) for i in range(4)]
    assert [row.tokens for row in result.rows] == [one.rows[0].tokens for one in alone]
    assert len({tuple(row.tokens) for row in result.rows}) == 4


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_lengths(plan: Any) -> None:
    for name, value, count in [("max_length", 8, 3), ("max_length", 6, 1), ("max_new_tokens", 1, 1)]:
        result = paceline.generate(
            target(), PROMPTS[0], draft=follows([PROMPTS[0] + free()[0]]), plan=plan, **{name: value}
        )
        assert result.rows[0].tokens == free()[0][:count]


def test_the_last_rounds_draft_no_more_than_may_be_committed() -> None:
    text = PROMPTS[0] + free()[0]
    for count, drafted in [(1, 0), (2, 0), (3, 1), (6, 4), (7, 4), (8, 5)]:
        result = paceline.generate(target(), PROMPTS[0], draft=follows([text]), plan=CHAIN, max_new_tokens=count)
        assert result.stats.total.drafted == result.stats.total.accepted == drafted


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # the case None is about that default
@pytest.mark.parametrize("length", [None, 20])
def test_the_end_of_the_positions_is_where_plain_generate_puts_it(length: int | None) -> None:
    model = tiny_llama(layers=2, max_position_embeddings=64)
    prompt = prompts(1)[0] * 12
    options = {} if length is None else {"max_new_tokens": length}
    want = new_tokens(model, prompt, **options)
    assert len(want) == (length or 4)
    own = make_target(model)
    for draft, plan in [(follows([prompt + want]), CHAIN), (tiny_eagle3(own), TREE), (Ngram(NgramConfig()), TREE)]:
        result = paceline.generate(own, prompt, draft=draft, plan=plan, **options)
        assert result.rows[0].tokens == want
        offered = result.stats.total
        assert offered.drafted <= sum(min(plan.nodes, 64) for _ in range(offered.rounds))


def test_a_padded_target_vocabulary_and_a_draft_without_the_padding() -> None:
    small, padded = make_target(tiny_llama(layers=2)), tiny_llama(layers=2, vocab=72)
    with torch.no_grad():
        for wide, narrow in zip(padded.parameters(), small.model.parameters(), strict=True):
            wide.zero_()
            wide[tuple(slice(0, size) for size in narrow.shape)] = narrow
        padded.lm_head.weight[64:] = 0.01
    own, draft = make_target(padded), tiny_eagle3(small)
    options, drafted = {"max_new_tokens": TOKENS}, 0
    for plan in (CHAIN, TREE, SAMPLED_CHAIN, SAMPLED_TREE):
        greedy = paceline.generate(own, PROMPTS, draft=draft, plan=plan, **options)
        assert [row.tokens for row in greedy.rows] == free()
        sampled = paceline.generate(own, PROMPTS, draft=draft, plan=plan, temperature=6.0, **options)
        written = [(t, d) for row in sampled.rows for t, d in zip(row.tokens, row.from_draft, strict=True)]
        assert all(token < 64 for token, is_drafted in written if is_drafted)
        drafted += sum(is_drafted for _, is_drafted in written)
    assert drafted > 3


REFUSED: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "low"},
    {"prompt_lookup_num_tokens": 3},
    {"output_attentions": True, "return_dict_in_generate": True},
    {"output_hidden_states": True, "return_dict_in_generate": True},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"assistant_model": "another"},
    {"token_healing": True},
    {"streamer": BaseStreamer()},
    {"guidance_scale": 1.5, "num_return_sequences": 2, "temperature": 1.0},
]


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: next(iter(options)))
def test_what_cannot_be_honoured_is_refused_by_name_before_any_work(options: dict[str, Any], monkeypatch: Any) -> None:
    def no_work(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr(target().model, "forward", no_work)
    with pytest.raises(UnsupportedOption, match=next(iter(options))) as caught:
        paceline.generate(target(), PROMPTS[0], draft=eagle(), max_new_tokens=4, **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedOption):
        paceline.generate_stream(target(), PROMPTS[0], draft=eagle(), max_new_tokens=4, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 3}, "max_length"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1.0, "top_p": -0.5, "max_new_tokens": 4}, "top_p"),
        ({"stop_strings": "a", "tokenizer": None}, "tokenizer"),
        ({"stop_strings": "a", "tokenizer": tiny_tokenizer()}, "stop_strings"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
    ],
)
def test_a_wrong_value_is_one_line_of_ours(options: dict[str, Any], text: str) -> None:
    bare = make_target(target().model)
    with pytest.raises(ConfigError, match=text) as caught:
        paceline.generate(bare, PROMPTS[0], draft=eagle(), **options)
    assert "\n" not in str(caught.value)


def test_a_misspelt_option_is_named_with_its_neighbour() -> None:
    with pytest.raises(UnsupportedOption, match=r"max_new_token .*did you mean max_new_tokens"):
        paceline.generate(target(), PROMPTS[0], max_new_token=3)  # type: ignore[call-arg]
