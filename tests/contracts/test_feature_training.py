"""Drafts that borrow the target's head, through the real trainer, the disk and every door of decoding."""

import pytest
import torch
from safetensors.torch import load_file

import paceline
from fixtures_decoding import CHAIN, SAMPLED_CHAIN, SAMPLED_TREE, TREE, new_tokens, prompts
from fixtures_drafts import FEATURE, tiny_draft
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import Onlooker, counting_target, events, recipe_of, trained_draft, write_rows
from paceline.decoding.plan import ProposalPlan
from paceline.store.checkpoint import DraftInfo, load_draft, save_draft
from paceline.store.fingerprint import identify_target
from paceline.training.trainer import train

COUNTING = "one two three four five six seven eight nine ten one"
STEPS = {"ttt": "steps", "hass": "passes", "griffin": "passes"}


@pytest.mark.parametrize(("objective", "words"), [("ttt", 64), ("hass", 64), ("griffin", 40)])
@pytest.mark.parametrize("name", FEATURE)
def test_a_cycle_is_learnt(tmp_path, name, objective, words):
    target = counting_target()
    rows = write_rows(tmp_path / "rows.jsonl", count=10, answer=COUNTING)
    recipe = recipe_of(
        rows, f"draft.name={name}", f"draft.vocab_size={words}", f"objective.name={objective}",
        f"objective.options={{ {STEPS[objective]} = 3 }}", "training.steps=80", "training.validate_every=80",
        "training.learning_rate=5e-3",
    )  # fmt: skip
    watch = Onlooker()
    result = train(recipe, out=tmp_path / "out", watch=watch, target=target)
    assert result.best == 11 / 3  # the 11 tokens after the first in three rounds of at most four: the most there is
    lines = [event for event in events(tmp_path / "out") if event["event"] == "train"]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"] and lines[-1]["accuracy_2"] == 1.0
    assert not [line for line in watch.said if "on held-out rows it is" in line]
    assert not [key for key in load_file(tmp_path / "out" / "best" / "draft.safetensors") if "head" in key]
    loaded = load_draft(tmp_path / "out" / "best", target=target, warn=pytest.fail)
    question = [{"role": "user", "content": "two three"}]
    result = paceline.generate(target, question, draft=loaded, plan=ProposalPlan.chain(3), max_new_tokens=11)
    assert result.rows[0].text == COUNTING.replace(" ", "")
    assert result.stats.total.rounds == 3  # ten tokens after the first: everything that was drafted is accepted


@pytest.mark.parametrize("words", [None, 40])
@pytest.mark.parametrize("name", FEATURE)
def test_a_saved_draft_decodes_through_every_door_as_before(tmp_path, name, words):
    model = tiny_llama(layers=3)
    target = make_target(model, tokenizer=tiny_tokenizer())
    draft = tiny_draft(name, target, words=words)
    save_draft(tmp_path / "d", draft, info=DraftInfo(name, draft.config, identify_target(target), {}))
    loaded, bare = load_draft(tmp_path / "d", target=target, warn=pytest.fail), load_draft(tmp_path / "d")
    assert loaded.draft.state_dict().keys() == draft.state_dict().keys()
    for key, tensor in draft.state_dict().items():
        assert torch.equal(loaded.draft.state_dict()[key], tensor), key
    prompt = prompts(1)[0]
    expected = new_tokens(model, prompt, max_new_tokens=16)
    runs = []
    for each in (draft, loaded, bare):
        result = paceline.generate(target, prompt, draft=each, plan=TREE, max_new_tokens=16)
        assert result.rows[0].tokens == expected
        runs.append(result.stats.rows[0].runs)
    assert runs[0] == runs[1] == runs[2]
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
        custom_generate=paceline.speculative(load_draft(tmp_path / "d"), plan=CHAIN),
    )  # fmt: skip
    assert out[0, len(prompt) :].tolist() == expected


@pytest.mark.parametrize("name", FEATURE)
def test_a_taught_draft_is_lossless_in_batches_chains_and_trees(name):
    model = tiny_llama()
    target = make_target(model, tokenizer=tiny_tokenizer())
    expected = [new_tokens(model, prompt, max_new_tokens=20) for prompt in prompts(8)]
    texts = [(prompt + path, len(prompt)) for prompt, path in zip(prompts(8), expected, strict=True)]
    draft = trained_draft(target, texts[:6], changes=(f"draft.name={name}",))
    for plan in (CHAIN, TREE):
        result = paceline.generate(target, prompts(8)[4:], draft=draft, plan=plan, max_new_tokens=20)
        assert [row.tokens for row in result.rows] == expected[4:]
        assert 1.2 < result.stats.total.accepted_length < 5.0
    for plan in (SAMPLED_CHAIN, SAMPLED_TREE):  # their law is proved in test_sampling_law
        result = paceline.generate(target, prompts(2), draft=draft, plan=plan, max_new_tokens=12, temperature=1.0)
        assert [len(row.tokens) for row in result.rows] == [12, 12]
        assert result.stats.total.accepted > 0


def test_one_draft_serves_two_targets_in_turn():
    models = [tiny_llama(seed=seed) for seed in (0, 1)]
    targets = [make_target(model) for model in models]
    draft = tiny_draft("griffin", targets[0])
    prompt = prompts(1)[0]
    for turn in (0, 1, 0):
        result = paceline.generate(targets[turn], prompt, draft=draft, plan=TREE, max_new_tokens=12)
        assert result.rows[0].tokens == new_tokens(models[turn], prompt, max_new_tokens=12)
        assert torch.equal(draft.head_weight, targets[turn].head_weight)
