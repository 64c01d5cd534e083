"""Chat rows to token ids and a mask of what the target itself writes: exactly the answers and their end-of-turn token.

This module knows no model family and no separator strings. Everything is found by rendering: the prompt of a turn is
the template with `add_generation_prompt`, its answer is what the template adds when the turn itself is rendered, and
the text that closes a turn is what stays equal when only the answer changes. Each cut is then checked token for token.

Rules. (1) The whole conversation is one example when every turn's prompt, as served, is a token prefix of the full
rendering. (2) Otherwise (templates that drop earlier thinking, or whose last turn looks different) each assistant turn
is an example of its own: the prompt exactly as served, then the answer. (3) When a template's rendering of a turn does
not continue its own generation prompt (it strips the thinking that the prompt opens), the answer is the raw text of the
turn, which must continue what the prompt opened; where the prompt opens and closes a block that the turn fills
(thinking, in non-thinking mode), the answer is what follows the block. (4) Supervised are the answer and the closing
text up to its first special token; nothing after that. (5) `{% generation %}` markers, where the template has them,
narrow the answer to what its author says the target writes. (6) A row that fits none of these is refused with a
DataError that names the reason. Templates that print today's date make ids that change by the day: pin it with the
template's own option (`date_string` for Llama 3).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.data.rows import Message
from paceline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "Pack my box with five jugs. Wie h\u00e4ltst du es? 12 + 345;\n\tdef f(x): return x**2\n\u4f60 \U0001f600"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a rendering and, per token, whether the target wrote it.  Both have length T."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True, slots=True)
class _Served:
    """One assistant turn as text: `closed` = prompt + answer + end of turn, `text` = the rendering it was cut from."""

    prompt: str
    closed: str
    text: str
    upto: int  # number of messages in `text`
    is_rendered: bool  # False: rule 3


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A tokenizer, its chat template and the template options (`enable_thinking`, `date_string` ...) of every row.

    stop_ids: further ids that end generation (the target's EOS list).  Raises DataError when the tokenizer has no chat
    template or when the template cannot render a plain exchange.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: Sequence[int] = ()
    tail: str = field(init=False, default="")  # what the template puts after the last answer
    closing: str = field(init=False, default="")  # the part of `tail` that the target writes itself

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template; expected one in the target's folder (chat_template.jinja)"
            )
        if self.has_markers and not self.tokenizer.is_fast:
            raise DataError(
                "the chat template marks {% generation %}, which needs a fast tokenizer; install `tokenizers`"
            )
        probes = [[{"role": "user", "content": "0"}, {"role": "assistant", "content": text}] for text in ("1", "2")]
        one, two = (self.render(probe) for probe in probes)
        if one == two:
            raise DataError(
                "the chat template does not render the assistant's text; expected a template with all turns"
            )
        tail = _shared(one[::-1], two[::-1])[::-1]
        object.__setattr__(self, "tail", tail)
        object.__setattr__(self, "closing", self._until_special(tail))

    @property
    def has_markers(self) -> bool:
        """Whether the template carries `{% generation %}` markers."""
        template = self.tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        return any(_MARKER.search(str(text)) for text in texts)

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer: the template's end of turn, the tokenizer's EOS and `stop_ids`."""
        eos = self.tokenizer.eos_token_id
        return frozenset({*self.stop_ids, *self.tokenize(self.closing)[-1:], *([eos] if isinstance(eos, int) else [])})

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Any] | None = None) -> str:
        """Text of the conversation, with the opened assistant turn when `prompt`.  Raises DataError when refused."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"the chat template refuses the row: {type(error).__name__}: {error}") from error
        return str(text)

    def tokenize(self, text: str) -> list[int]:
        """Ids of rendered text, exactly as `apply_chat_template` makes them (it writes special tokens itself)."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of a prompt as served: the conversation so far and the opened assistant turn."""
        return self.tokenize(self.render(messages, prompt=True, tools=tools))

    def encode(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> tuple[Encoded, ...]:
        """Ids and mask of a conversation: one example, or one per assistant turn (rules 1 and 2 above).

        Turns after the last assistant turn are cut.  Raises DataError with the reason when the row is refused.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError("no assistant turn: nothing to train on")
        served = [self._serve(messages, index, tools) for index in turns]
        cut = [(self.tokenize(turn.prompt), self.tokenize(turn.closed)) for turn in served]
        last = served[-1]
        ids = self.tokenize(last.text)
        is_whole = last.is_rendered and all(
            _extends(closed, prompt) and _extends(ids, closed) for prompt, closed in cut
        )
        if not is_whole:
            singles = zip(served, cut, strict=True)
            return tuple(self._single(turn, prompt, closed, messages, tools) for turn, (prompt, closed) in singles)
        mask = [False] * len(ids)
        for prompt, closed in cut:
            self._check_answer(closed[len(prompt) :])
            mask[len(prompt) : len(closed)] = [True] * (len(closed) - len(prompt))
        spans = [(len(prompt), len(closed)) for prompt, closed in cut]
        return (Encoded(ids=ids, mask=self._narrow(mask, spans, messages[: last.upto], tools)),)

    def template_digest(self) -> str:
        """sha256 (hex) of the chat template and the options."""
        content = [self.tokenizer.chat_template, dict(self.options)]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def _serve(self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None) -> _Served:
        prompt = self.render(messages[:index], prompt=True, tools=tools)
        text = self.render(messages[: index + 1], tools=tools)
        if not text.startswith(prompt):
            answer = self._raw_answer(messages, index, prompt=prompt, text=text, tools=tools)
            closed = prompt + answer + self.closing
            return _Served(prompt=prompt, closed=closed, text=closed, upto=index + 1, is_rendered=False)
        if text.endswith(self.tail) and len(text) - len(self.tail) >= len(prompt):
            closed = text[: len(text) - len(self.tail)] + self.closing
        elif self.tokenize(text)[-1:] and self.tokenize(text)[-1] in self.end_ids:
            closed = text
        else:
            raise DataError(f"the chat template closes this turn otherwise than a plain answer: {text[-24:]!r}")
        return _Served(prompt=prompt, closed=closed, text=text, upto=index + 1, is_rendered=True)

    def _raw_answer(
        self, messages: Sequence[Message], index: int, *, prompt: str, text: str, tools: Sequence[Any] | None
    ) -> str:
        message = messages[index]
        shared = _shared(prompt, text)
        if len(shared) < len(self.render(messages[:index], tools=tools)):
            raise DataError(
                "the chat template rewrites earlier turns once this one is added: its answer cannot be located"
            )
        before, block, after = text[len(shared) :].partition(prompt[len(shared) :])
        if before and block and after.endswith(self.tail):
            return after[: len(after) - len(self.tail)]
        if message.get("tool_calls") or message.get("reasoning_content"):
            raise DataError(
                "the chat template does not continue its own generation prompt, and the turn is not plain text"
            )
        opened, answer = prompt[len(shared) :], message["content"]
        if answer.startswith(opened):
            return answer[len(opened) :]
        if not answer.lstrip().startswith(opened.strip()):
            raise DataError(
                f"the generation prompt opens the answer with {opened!r}, which this answer does not continue"
            )
        rest = answer.lstrip()[len(opened.strip()) :]
        return rest.lstrip() if opened[-1:].isspace() else rest

    def _single(
        self,
        turn: _Served,
        prompt: list[int],
        closed: list[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> Encoded:
        ids = self.tokenize(turn.text)
        if not (_extends(closed, prompt) and _extends(ids, closed)):
            # The answer's first characters merge with the prompt; the target writes them as tokens of their own.
            ids = prompt + self.tokenize(turn.closed[len(turn.prompt) :])
            if self.tokenizer.decode(ids) != self.tokenizer.decode(closed):
                raise DataError("the answer's first characters merge with the generation prompt: no ids as served")
            self._check_answer(ids[len(prompt) :])
            return Encoded(ids=ids, mask=[False] * len(prompt) + [True] * (len(ids) - len(prompt)))
        self._check_answer(closed[len(prompt) :])
        mask = [len(prompt) <= position < len(closed) for position in range(len(ids))]
        if turn.is_rendered:
            mask = self._narrow(mask, [(len(prompt), len(closed))], messages[: turn.upto], tools)
        return Encoded(ids=ids, mask=mask)

    def _check_answer(self, answer: list[int]) -> None:
        if not answer:
            raise DataError("empty answer: the template renders nothing for this assistant turn")
        ends = self.end_ids
        early = next((token for token in answer[:-1] if token in ends), None)
        if early is not None:
            name = self.tokenizer.convert_ids_to_tokens(early)
            raise DataError(f"the answer holds an end token before its end: {name}")

    def _narrow(
        self, mask: list[bool], spans: list[tuple[int, int]], messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[bool]:
        """Keep of each answer what the template's own markers mark, and its end of turn; without markers, all of it."""
        if not self.has_markers:
            return mask
        encoded: Any = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.options,
        )
        marked = [bool(flag) for flag in encoded["assistant_masks"]]
        assert len(marked) == len(mask), "two renderings of one conversation differ"
        narrowed = [ours and theirs for ours, theirs in zip(mask, marked, strict=True)]
        width = len(self.tokenize(self.closing))
        for start, end in spans:
            if any(narrowed[start:end]):
                narrowed[end - width : end] = [True] * width
        if not any(narrowed):
            raise DataError("the template's {% generation %} markers mark nothing of this row")
        return narrowed

    def _until_special(self, tail: str) -> str:
        """The tail up to and including its first special token; "" when it holds none: such turns have no end token."""
        special = set(self.tokenizer.all_special_ids) | set(self.stop_ids)
        special |= {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        for token in self.tokenize(tail):
            if token in special:
                name = self.tokenizer.convert_ids_to_tokens(token)
                found = tail.find(str(name))
                return tail[: found + len(str(name))] if found >= 0 else ""
        return ""


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) of what makes ids: every token with its id, the special ids, and the ids of a probe text."""
    content = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)]
    content.append(tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _shared(one: str, two: str) -> str:
    """The longest common prefix."""
    for index, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return one[:index]
    return min(one, two, key=len)


def _extends(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix
