"""Requests that are unusual but right, and those that are wrong: each works, or is refused in one line."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import paceline
from fixtures_decoding import TREE, new_tokens, prompts
from fixtures_drafts import tiny_eagle3
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.decoding import loop
from paceline.decoding.continuous import ContinuousBatch, Request
from paceline.decoding.plan import ProposalPlan
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import ConfigError, TargetError
from paceline.targets.generic import Target


@pytest.mark.parametrize("batch", [1, 3])
def test_an_answer_longer_than_the_cache_at_first(monkeypatch, batch):
    target = make_target(tiny_llama())
    want = [new_tokens(target.model, prompt, max_new_tokens=60) for prompt in prompts(batch)]
    monkeypatch.setattr(loop, "RESERVED", 3)
    for draft in (None, Ngram(NgramConfig()), tiny_eagle3(target)):
        result = paceline.generate(target, prompts(batch), draft=draft, plan=TREE, max_new_tokens=60)
        assert [row.tokens for row in result.rows] == want


def test_a_huge_limit_costs_nothing_when_the_answer_ends():
    target = make_target(tiny_llama())
    prompt = prompts(1)[0]
    end = new_tokens(target.model, prompt, max_new_tokens=9)[-1]
    result = paceline.generate(target, prompt, draft=tiny_eagle3(target), max_new_tokens=10**9, eos_token_id=end)
    assert result.rows[0].tokens[-1] == end


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_a_draft_of_another_dtype_works(kind):
    target = make_target(tiny_llama())
    want = new_tokens(target.model, prompts(1)[0], max_new_tokens=20)
    for plan in (TREE, ProposalPlan.chain(3)):
        draft = tiny_eagle3(target).to(kind)
        assert paceline.generate(target, prompts(1), draft=draft, plan=plan, max_new_tokens=20).rows[0].tokens == want
    sampled = ProposalPlan.chain(3, law="sampled")
    result = paceline.generate(target, prompts(1), draft=draft, plan=sampled, max_new_tokens=20, temperature=1.0)
    assert len(result.rows[0].tokens) == 20


def test_a_draft_for_another_width_is_refused():
    target, wide = make_target(tiny_llama()), make_target(tiny_llama(hidden_size=64))
    with pytest.raises(ConfigError, match="of width 64; the target has layers 0 to 3 of width 32"):
        paceline.generate(target, prompts(1), draft=tiny_eagle3(wide), max_new_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_no_answer(temperature):
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    target = make_target(model)
    request = {"do_sample": True, "temperature": temperature} if temperature else {}
    with pytest.raises(TargetError, match="scores of token 4 are not numbers"):
        paceline.generate(target, [3, 4, 5, 6], max_new_tokens=4, **request)
    queue = ContinuousBatch(target, slots=1, capacity=16)
    queue.submit([Request(0, [3, 4, 5], 4, stop_ids=frozenset(), temperature=temperature)])
    with pytest.raises(TargetError, match="the target's logits are not numbers"):
        list(queue.run())


def test_learned_positions_are_not_overrun():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=24, eos_token_id=None)
    target = Target(GPT2LMHeadModel(config).eval(), compile="off")
    assert target.learned_positions == 24
    assert make_target(tiny_llama()).learned_positions is None
    with pytest.raises(ConfigError, match="learned positions for 24"):
        paceline.generate(target, [1, 2, 3], max_new_tokens=22)
    assert len(paceline.generate(target, [1, 2, 3], max_new_tokens=21).rows[0].tokens) == 21


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"draft": "ngram"}, "draft is a str"),
        ({"draft": 3}, "draft is a int"),
        ({"draft": Ngram}, "draft is a "),
        ({"draft": paceline.speculative(None)}, "draft is a CustomGenerate; expected what paceline.load_draft returns"),
        ({"plan": "chain:5"}, "plan is a str"),
        ({"plan": ProposalPlan}, "plan is a type"),
        ({"plan": ""}, "plan is a str"),
        ({"seed": "7"}, "seed is '7'"),
    ],
)
def test_names_where_objects_are_expected(wrong, words):
    for door in (paceline.generate, paceline.generate_stream):
        with pytest.raises(ConfigError, match=words) as caught:
            door(make_target(tiny_llama()), [1, 2], max_new_tokens=2, **wrong)
        assert "\n" not in str(caught.value)
    if "seed" not in wrong:
        with pytest.raises(ConfigError, match=words):
            paceline.speculative(**{"draft": None, **wrong})


def test_a_name_where_a_function_is_expected():
    with pytest.raises(ConfigError, match="on_commit is a str; expected a function"):
        paceline.generate(make_target(tiny_llama()), [1, 2], on_commit="print", max_new_tokens=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[1, 2], "hello", [{"role": "user", "content": "hello"}]], ids=str)
@pytest.mark.parametrize("kind", ["model", "name"])
def test_a_model_where_a_target_is_expected(kind, prompt):
    given = tiny_llama() if kind == "model" else "smollm2"
    for door in (paceline.generate, paceline.generate_stream):
        with pytest.raises(
            ConfigError, match=r"target is a .*paceline\.Target\(model, tokenizer=tokenizer\)"
        ) as caught:
            door(given, prompt, max_new_tokens=2)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [{"depth": "chain:5"}, {"depth": 2.5}, {"width": None}, {"nodes": "5"}])
def test_a_plan_of_something_else_than_numbers(size):
    with pytest.raises(ConfigError, match=r"proposal: \w+ is .*; expected a whole number"):
        ProposalPlan(**size)


@pytest.mark.parametrize("name", [3, None, tiny_llama(layers=1)], ids=lambda name: type(name).__name__)
def test_a_target_is_loaded_by_its_name_only(name):
    with pytest.raises(TargetError, match=r"found a .*paceline\.Target\(model, tokenizer=tokenizer\)"):
        paceline.load_target(name)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("smollm2", "str 'smollm2'"), (tiny_llama().model, "LlamaModel"), (None, "NoneType")],
)
def test_a_target_made_of_what_has_no_output_head(wrong, words):
    with pytest.raises(TargetError, match=f"the target's model is {words}"):
        paceline.Target(wrong)


def test_messages_for_a_target_without_a_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; pass a text"):
        paceline.generate(make_target(tiny_llama(), tokenizer=tokenizer), [{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("messages", [[{}], [{"role": "user", "content": "hello"}, 3]], ids=str)
def test_messages_that_the_chat_template_refuses(messages):
    with pytest.raises(ConfigError, match="the chat template refuses the messages") as caught:
        paceline.generate(make_target(tiny_llama(), tokenizer=tiny_tokenizer()), messages, max_new_tokens=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [None, 3.5, [1.5, 2.0], [[1, 2], None], torch.tensor(3), [[]], [], object()])
def test_prompts_that_are_none(prompt):
    with pytest.raises(ConfigError) as caught:
        paceline.generate(make_target(tiny_llama()), prompt, max_new_tokens=2)
    assert "\n" not in str(caught.value)


def test_a_tensor_of_ids_is_a_prompt():
    target = make_target(tiny_llama())
    want = new_tokens(target.model, prompts(1)[0], max_new_tokens=4)
    assert paceline.generate(target, torch.tensor(prompts(1)[0]), max_new_tokens=4).rows[0].tokens == want  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [{"depth": 10**14}, {"depth": 2, "width": 10**10, "nodes": 3}, {"nodes": 5000}])
def test_a_plan_that_no_machine_could_hold(size):
    with pytest.raises(ConfigError, match="at most 4096 nodes"):
        ProposalPlan(**size)


def test_an_engine_that_does_not_exist():
    with pytest.raises(ConfigError, match="compile is 'on'; expected 'auto' or 'off'"):
        Target(tiny_llama(), compile="on")  # type: ignore[arg-type]


@pytest.mark.parametrize("draft", [None, Ngram(NgramConfig())])
@pytest.mark.parametrize(
    ("option", "value"),
    [("bad_words_ids", [[999]]), ("sequence_bias", [[[999], 2.0]]), ("forced_eos_token_id", 999)],
)
def test_an_id_that_no_vocabulary_holds_is_one_line_when_its_processor_meets_it(option, value, draft):
    target = make_target(tiny_llama())
    with pytest.raises(ConfigError) as caught:
        paceline.generate(target, prompts(1), draft=draft, max_new_tokens=4, **{option: value})
    assert "999" in str(caught.value) and "\n" not in str(caught.value)
