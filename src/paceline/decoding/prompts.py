"""What a caller hands over as prompts becomes token ids: texts as they are, messages through the chat template.

It knows the three kinds of prompt and no option.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, cast

from torch import Tensor

from paceline.errors import ConfigError
from paceline.targets.generic import Target

EXPECTED = "expected a text, token ids, or chat messages"
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as the target reads it.

    ids: at least one.  is_bare: a text that a chat template would have framed, had it come as messages.
    """

    ids: list[int]
    is_bare: bool


def read_prompts(prompts: object, target: Target) -> list[PromptIds]:
    """Each prompt's ids; one prompt alone is a text, a list of ids, or a list of messages.  Raises ConfigError."""
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()  # sync
    if isinstance(prompts, str):
        return [read_prompt(prompts, target)]
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is a {type(prompts).__name__}; {EXPECTED}, or a list of these")
    several = cast("Sequence[object]", prompts)
    if len(several) == 0:
        raise ConfigError(f"no prompts were given; {EXPECTED}, or a list of these")
    if isinstance(several[0], (str, Sequence, Tensor)):
        return [read_prompt(prompt, target) for prompt in several]
    return [read_prompt(several, target)]


def read_prompt(prompt: object, target: Target) -> PromptIds:
    """The ids of one prompt.  Raises ConfigError."""
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()  # sync
    if not isinstance(prompt, Sequence):
        raise ConfigError(f"a prompt is a {type(prompt).__name__}; {EXPECTED}")
    is_bare = False
    if isinstance(prompt, str):
        tokenizer = _tokenizer(target)
        ids, is_bare = list(tokenizer(prompt)["input_ids"]), bool(tokenizer.chat_template)
    elif len(prompt) > 0 and isinstance(prompt[0], dict):
        ids = _render(list(cast("Sequence[object]", prompt)), _tokenizer(target))
    else:
        ids = [_id(token) for token in cast("Sequence[object]", prompt)]
    if not ids:
        raise ConfigError("an empty prompt cannot be continued; give at least one token")
    bad = [token for token in ids if not 0 <= token < target.vocab_size]
    if bad:
        raise ConfigError(f"token id {bad[0]} is not in the target's vocabulary of {target.vocab_size}")
    return PromptIds(ids, is_bare)


def _tokenizer(target: Target) -> Any:
    if target.tokenizer is None:
        raise ConfigError("this target has no tokenizer; pass token ids")
    return target.tokenizer


def _render(messages: list[object], tokenizer: Any) -> list[int]:
    """Ids of a conversation with the answer opened.  Raises ConfigError."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError("this target has no chat template; pass a text, which is continued as it is")
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the chat template refuses the messages ({' '.join(str(error).split())}); expected a list such as "
            "[{'role': 'user', 'content': 'Hello'}]"
        ) from error
    return list(encoded["input_ids"])


def _id(token: object) -> int:
    try:
        return operator.index(cast("SupportsIndex", token))
    except TypeError:
        raise ConfigError(f"a prompt holds {token!r}, a {type(token).__name__}; {EXPECTED}") from None
