"""F4: a word-level tokenizer of 64 tokens built in code, and chat templates of the kinds found in the field.

Words are split at single spaces; a line break is a token of its own; eot != eos.
"""

from __future__ import annotations

import functools

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<eot>", "<think>", "</think>", "<tool>")
_LINE = (
    "\n system user assistant tool be kind hello what is one two three four five six seven eight nine ten plus minus "
    "the answer so we add call weather city paris rome sunny rain and it = : . , ? yes no thanks bye name "
    "ask me a b c d e f g h"
)
WORDS = tuple(_LINE.split(" "))

_HEAD = "{{ bos_token }}{% for m in messages %}"
_CALLS = (
    "{% for t in m['tool_calls'] or [] %} <tool> {{ t['function']['name'] }}"
    "{% for k, v in t['function']['arguments'].items() %} {{ k }} = {{ v }}{% endfor %}{% endfor %}"
)
_NO_THINK = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think> </think> ' }}{% endif %}"
_OPEN = "{% if add_generation_prompt %}{{ 'assistant \n ' }}" + _NO_THINK + "{% endif %}"

# Keeps what it is given: every prompt is a prefix of the full rendering.
KEEPS = (
    _HEAD
    + "{{ m['role'] + ' \n ' }}{% if m['role'] == 'assistant' and '<think>' not in m['content'] %}"
    + _NO_THINK
    + "{% endif %}{{ m['content'] }}"
    + _CALLS
    + "{{ ' <eot> \n ' }}{% endfor %}"
    + _OPEN
)

# Drops the thinking of all turns but the last, as reasoning models do.
STRIPS = (
    _HEAD
    + "{{ m['role'] + ' \n ' }}{% if m['role'] == 'assistant' and not loop.last %}"
    + "{{ m['content'].split('</think> ')[-1] }}"
    + "{% else %}{% if m['role'] == 'assistant' and '<think>' not in m['content'] %}"
    + _NO_THINK
    + "{% endif %}{{ m['content'] }}{% endif %}"
    + _CALLS
    + "{{ ' <eot> \n ' }}{% endfor %}"
    + _OPEN
)

# Opens the thinking in the prompt and drops it from every rendered answer.
OPENS = (
    _HEAD
    + "{{ m['role'] + ' \n ' }}{{ m['content'].split('</think> ')[-1] }}{{ ' <eot> \n ' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ 'assistant \n <think> ' }}{% endif %}"
)

# Marks what the target writes, line break after the end of turn included, and ends the conversation with eos.
MARKS = (
    _HEAD
    + "{{ m['role'] + ' \n ' }}{% if m['role'] == 'assistant' %}"
    + "{% generation %}{{ m['content'] + ' <eot> \n ' }}{% endgeneration %}"
    + "{% else %}{{ m['content'] + ' <eot> \n ' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ 'assistant \n ' }}{% else %}{{ eos_token }}{% endif %}"
)


def tiny_tokenizer(template: str = KEEPS) -> PreTrainedTokenizerFast:
    """F4 with one of the templates above.  64 tokens, ids in the order of SPECIAL + WORDS."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    assert len(vocabulary) == 64, len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" "), "removed"), pre_tokenizers.Split(Regex("\n"), "isolated")]
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],  # 4.57 adds token types, which decoders refuse
    )
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """64 tokens of one or two letters, so that a stop string may end or begin inside one."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(one, two) for two in "hz" for one in alphabet][: 64 - len(alphabet)]
    tokens = [one + two for one, two in pairs[:13]] + list(alphabet) + [one + two for one, two in pairs[13:]]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def words(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Tokens joined by single spaces: the inverse of the word splitter."""
    return " ".join(tokenizer.convert_ids_to_tokens(ids))
