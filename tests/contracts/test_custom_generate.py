"""The door for people who stay in transformers: `model.generate(..., custom_generate=paceline.speculative(draft))`."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import paceline
from fixtures_decoding import CHAIN, SAMPLED_CHAIN, SAMPLED_TREE, TREE, follows, prompts, trips
from fixtures_drafts import tiny_eagle3
from fixtures_models import bigram_model, cycle_table, make_target, tiny_llama
from fixtures_text import letters
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import UnsupportedOption
from paceline.store.checkpoint import DraftInfo, save_draft
from paceline.store.fingerprint import identify_target

PROMPTS = prompts(4)
TOKENS = 12
PAD = 0
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@functools.cache
def model() -> Any:
    return tiny_llama(layers=2)


@functools.cache
def eagle() -> Any:
    return tiny_eagle3(make_target(model()))


def left_padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


class Alternate(LogitsProcessor):
    """Forbids half of the words, another half for each row: it depends on the place in the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = torch.arange(len(scores))[:, None]
        return scores.masked_fill((torch.arange(scores.shape[-1])[None] + row) % 2 == 0, -torch.inf)


class RowStop(StoppingCriteria):
    """Row i stops after 3 + i new tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.arange(len(input_ids)) + 3 <= input_ids.shape[1] - 14


def end_of(row: int, place: int) -> int:
    out = model().generate(torch.tensor([PROMPTS[row]]), do_sample=False, max_new_tokens=TOKENS)
    return int(out[0, len(PROMPTS[row]) + place])


CASES: dict[str, Any] = {
    "nothing": dict,
    "one row ends early": lambda: {"eos_token_id": end_of(2, 4), "pad_token_id": PAD},
    "padded with the end token": lambda: {"eos_token_id": end_of(1, 3)},
    "pads are not penalised": lambda: {"repetition_penalty": 1.3},
    "pads count for n-grams": lambda: {"no_repeat_ngram_size": 1},
    "prompt penalty": lambda: {"encoder_repetition_penalty": 1.5},
    "prompt n-grams": lambda: {"encoder_no_repeat_ngram_size": 1},
    "min length with pads": lambda: {
        "min_length": 19, "eos_token_id": [end_of(i, 1) for i in range(4)], "pad_token_id": PAD,
    },
    "grammar by row": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row % 3, 64, 3))},
    "processor by row": lambda: {"logits_processor": [Alternate()]},
    "criterion by row": lambda: {"stopping_criteria": [RowStop()], "eos_token_id": 63, "pad_token_id": PAD},
    "max_length": lambda: {"max_length": 19},
    "bad words": lambda: {"bad_words_ids": [[end_of(0, 1)], [end_of(3, 2)]]},
}  # fmt: skip


def call(rows: list[list[int]], **options: Any) -> Any:
    if "max_length" not in options:
        options.setdefault("max_new_tokens", TOKENS)
    return model().generate(**left_padded(rows), **options)


@functools.cache
def expected(case: str) -> Any:
    return call(
        PROMPTS, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True, **CASES[case]()
    )


@pytest.mark.parametrize("case", CASES)
def test_a_left_padded_batch_equals_plain_generate(case: str) -> None:
    want = expected(case)
    width = max(map(len, PROMPTS))
    texts = [row[width - len(prompt) :] for row, prompt in zip(want.sequences.tolist(), PROMPTS, strict=True)]
    for draft, plan in [(None, CHAIN), (follows(texts), CHAIN), (trips(texts), TREE), (eagle(), TREE)]:
        door = paceline.speculative(draft, plan=plan)
        ids = call(PROMPTS, do_sample=False, custom_generate=door, **CASES[case]())
        assert ids.tolist() == want.sequences.tolist()
        assert sum(len(row) for row in ids) > 0


@pytest.mark.parametrize("case", ["nothing", "one row ends early", "pads are not penalised"])
def test_a_dictionary_holds_scores_and_logits(case: str) -> None:
    want = expected(case)
    door = paceline.speculative(eagle(), plan=TREE)
    got = call(PROMPTS, do_sample=False, custom_generate=door, **RECORDED, **CASES[case]())
    assert got.sequences.tolist() == want.sequences.tolist()
    assert len(got.scores) == len(want.scores) == len(got.logits)
    end = CASES[case]().get("eos_token_id")
    for row in range(len(PROMPTS)):
        tail = got.sequences[row, max(map(len, PROMPTS)) :].tolist()
        length = tail.index(end) + 1 if end in tail else len(tail)
        for step in range(len(tail)):
            if step < length:
                torch.testing.assert_close(got.scores[step][row], want.scores[step][row], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(got.logits[step][row], want.logits[step][row], atol=1e-4, rtol=1e-4)
            else:
                assert not got.scores[step][row].any()
    plainly = call(PROMPTS[:1], custom_generate=paceline.speculative(eagle()), return_dict_in_generate=True)
    assert plainly.scores is None and plainly.logits is None


def test_the_models_own_generation_configuration_counts() -> None:
    own = tiny_llama(layers=2)
    own.generation_config = GenerationConfig(
        repetition_penalty=1.4, max_new_tokens=7, eos_token_id=end_of(0, 5), pad_token_id=PAD, do_sample=True, top_k=1
    )
    inputs = left_padded([PROMPTS[0]])
    want = own.generate(**inputs)
    door = paceline.speculative(eagle(), plan=SAMPLED_TREE)
    assert own.generate(**inputs, custom_generate=door).tolist() == want.tolist()


@pytest.mark.parametrize("plan", [SAMPLED_CHAIN, SAMPLED_TREE, TREE], ids=str)
def test_manual_seed_makes_sampling_repeatable(plan: Any) -> None:
    door = paceline.speculative(eagle(), plan=plan)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(call(PROMPTS, do_sample=True, top_k=0, custom_generate=door).tolist())
        drawn.append(call(PROMPTS, do_sample=True, top_k=0, custom_generate=door).tolist())
    assert drawn[:2] == drawn[2:4]
    assert drawn[0] != drawn[1] != drawn[4]


def test_greedy_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    call(PROMPTS, do_sample=False, custom_generate=paceline.speculative(eagle()))
    assert torch.equal(before, torch.get_rng_state())


def test_several_sequences_of_one_prompt_differ() -> None:
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 3, "num_return_sequences": 4}
    ids = call(PROMPTS[:2], custom_generate=paceline.speculative(eagle(), plan=SAMPLED_TREE), **options)
    assert ids.shape == (8, 9 + TOKENS)
    assert len({tuple(row) for row in ids.tolist()}) == 8
    assert [row[:9] for row in ids.tolist()] == [
        row for row in left_padded(PROMPTS[:2])["input_ids"].tolist() for _ in range(4)
    ]


class Heard(BaseStreamer):
    """Keeps what is streamed."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_streamer_hears_what_plain_generate_streams(place: int) -> None:
    cycle = bigram_model(cycle_table())
    ids = torch.tensor([[0]])
    path = cycle.generate(ids, max_new_tokens=10)[0].tolist()
    options = {"max_new_tokens": 10, "eos_token_id": path[place + 1], "pad_token_id": 63}
    plainly, ours = Heard(), Heard()
    cycle.generate(ids, streamer=plainly, **options)
    cycle.generate(ids, streamer=ours, custom_generate=paceline.speculative(follows([path])), **options)
    assert ours.heard == plainly.heard
    assert ours.ended == plainly.ended == 1


@pytest.mark.parametrize("where", ["option", "generation_config"])
@pytest.mark.parametrize("eos", [None, 63])
def test_stop_strings_end_where_plain_generate_ends(where: str, eos: int | None) -> None:
    """transformers drops the tokenizer of a custom method's call before it looks for it."""
    tokenizer, cycle = letters(), bigram_model(cycle_table())
    path = cycle.generate(torch.tensor([[0]]), max_new_tokens=20)[0].tolist()
    options: dict[str, Any] = {"max_new_tokens": 20, "tokenizer": tokenizer, "eos_token_id": eos, "pad_token_id": PAD}
    strings = ["sky", tokenizer.decode(path[9:10])]
    if where == "option":
        options["stop_strings"] = strings
    else:
        cycle.generation_config.stop_strings = strings
    ids = torch.tensor([[0]] if eos is None else [[0], [5]])
    want = cycle.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert 1 < want.shape[1] < 21
    door = paceline.speculative(follows([path]), plan=TREE)
    assert cycle.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=door, **options).tolist() == (
        want.tolist()
    )


def test_nobody_else_who_asks_for_the_signature_is_touched() -> None:
    def asks(generation_mode_kwargs: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        return inspect.signature(paceline.speculative(None))

    kwargs: dict[str, Any] = {}
    assert "input_ids" in asks({"tokenizer": 3}, kwargs).parameters
    assert not kwargs


def test_a_loaded_draft_works_as_it_is(tmp_path: Path) -> None:
    own = model()
    save_draft(tmp_path, eagle(), info=DraftInfo("eagle3", eagle().config, identify_target(make_target(own))))
    want = call(PROMPTS, do_sample=False)
    for loaded in (paceline.load_draft(tmp_path), paceline.load_draft(tmp_path, target=own)):
        ids = call(PROMPTS, do_sample=False, custom_generate=paceline.speculative(loaded, plan=TREE))
        assert ids.tolist() == want.tolist()
        result = paceline.generate(make_target(own), PROMPTS[0], draft=loaded, max_new_tokens=TOKENS)
        assert result.rows[0].tokens == call(PROMPTS[:1], do_sample=False)[0, len(PROMPTS[0]) :].tolist()
        streamed = paceline.generate_stream(make_target(own), PROMPTS[0], draft=loaded, max_new_tokens=TOKENS)
        assert [token for commit in streamed for token in commit.tokens] == result.rows[0].tokens


def test_counts_of_the_latest_call() -> None:
    door = paceline.speculative(Ngram(NgramConfig()), plan=TREE)
    cycle = bigram_model(cycle_table())
    cycle.generate(torch.tensor([list(range(13)) * 2]), max_new_tokens=20, custom_generate=door)
    assert door.stats.total.accepted > 10
    call(PROMPTS[:1], custom_generate=door)
    assert door.stats.total.emitted == TOKENS - 1


def test_a_door_does_not_keep_old_models_alive(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="paceline")  # a caught record holds what it speaks of
    door = paceline.speculative(None)
    one = tiny_llama(layers=2)
    watched = weakref.ref(one)
    for own in (one, model()):
        own.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=door)
    del one, own
    gc.collect()
    assert watched() is None


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_beams", {"num_beams": 3}),
    ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
    ("cache_implementation", {"cache_implementation": "static"}),
    ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
    ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 2}),
    ("guidance_scale", {"guidance_scale": 1.5}),
    ("position_ids", {"position_ids": torch.arange(14).repeat(4, 1)}),
    ("synced_gpus", {"synced_gpus": True}),
    ("assistant_model", {"assistant_model": tiny_llama(layers=1)}),
    ("SumStop without an eos_token_id", {"stopping_criteria": [type("SumStop", (RowStop,), {})()]}),
    ("streamer", {"streamer": Heard()}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name_before_any_work(
    name: str, options: dict[str, Any], monkeypatch: Any
) -> None:
    def no_work(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr(model(), "forward", functools.wraps(model().forward)(no_work))
    with pytest.raises(UnsupportedOption, match=name) as caught:
        call(PROMPTS, custom_generate=paceline.speculative(eagle()), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["holds something", "static"])
def test_a_given_cache_is_refused(kind: str) -> None:
    ids = torch.tensor([PROMPTS[0]])
    name = "cache" if "cache" in inspect.signature(model().forward).parameters else "past_key_values"
    cache = DynamicCache() if kind == "holds something" else StaticCache(config=model().config, max_cache_len=32)
    if kind == "holds something":
        model()(ids[:, :-1], use_cache=True, **{name: cache})
    with pytest.raises(UnsupportedOption, match="cache"):
        model().generate(
            ids, max_new_tokens=3, custom_generate=paceline.speculative(None), **{name: cache}
        )  # fmt: skip


def test_holes_and_right_padding_are_refused() -> None:
    ids = torch.tensor([[1, 2, 3, 4]] * 2)
    for mask in ([1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]):
        with pytest.raises(UnsupportedOption, match="attention_mask: row 1"):
            model().generate(
                ids, attention_mask=torch.tensor([[1] * 4, mask]), max_new_tokens=2,
                custom_generate=paceline.speculative(None),
            )  # fmt: skip
