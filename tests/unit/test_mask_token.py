"""Acceptance K11: the token that stands for a mark is one that no text holds, or training is refused."""

from __future__ import annotations

import pytest
import torch

from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.drafts import dflash
from paceline.errors import ConfigError
from paceline.targets._facts import facts_of


def chosen(tokenizer: object, *, vocab: int = 64, options: dict[str, object] | None = None) -> int:
    return dflash.configure(facts_of(tiny_llama(vocab=vocab), tokenizer), options or {}).mask_token_id


def test_an_unused_row_of_the_embedding() -> None:
    assert chosen(tiny_tokenizer(), vocab=72) == 64


def test_a_row_of_zeros_is_passed_over() -> None:
    model = tiny_llama(vocab=72)
    with torch.no_grad():
        model.get_input_embeddings().weight[64:66] = 0
    assert dflash.configure(facts_of(model, tiny_tokenizer()), {}).mask_token_id == 66


def test_the_tokenizers_own_mask_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<tool>"
    assert chosen(tokenizer, vocab=72) == tokenizer.convert_tokens_to_ids("<tool>")


def test_a_special_token_that_the_template_does_not_write() -> None:
    tokenizer = tiny_tokenizer()  # the template writes <think>, </think>, <tool> and <eot>
    assert chosen(tokenizer) == tokenizer.pad_token_id
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool>", "tool")
    assert chosen(tokenizer) == tokenizer.convert_tokens_to_ids("<tool>")


def test_no_room_is_refused_before_training() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template += "{# <pad> #}"
    with pytest.raises(ConfigError, match=r"set draft\.options\.mask_token_id"):
        chosen(tokenizer)
    assert chosen(tokenizer, options={"mask_token_id": 7}) == 7
    with pytest.raises(ConfigError, match=r"set draft\.options\.mask_token_id"):
        chosen(None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_token_id": 64}, "draft.options.mask_token_id: found 64, expected an id below 64"),
        ({"mask_token_id": -1}, "draft.options.mask_token_id: found -1"),
        ({"block_size": 1}, "draft.options.block_size: found 1"),
        ({"num_hidden_layers": 0}, "draft.options.num_hidden_layers: found 0"),
        ({"num_hidden_layers": "x"}, 'draft.options.num_hidden_layers: found "x"'),
        ({"num_key_value_heads": 3}, "a number that divides the 4 heads"),
        ({"taps": [0, 0]}, "draft.options.taps: found [0, 0], expected every layer once"),
        ({"taps": [0, 4]}, "draft.options.taps: [4] are not decoder layers"),
        ({"hidden_size": 31}, "draft.options.hidden_size is 31"),
        ({"rope": {"rope_thetta": 1e4}}, "rotary settings without rope_thetta"),
    ],
)
def test_an_option_that_no_block_draft_can_have(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dflash.configure(facts_of(make_target(tiny_llama()).model), {"mask_token_id": 1, **options})
    assert said in str(caught.value) and "\n" not in str(caught.value)
