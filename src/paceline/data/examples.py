"""Rows to training examples: tokenised, cut to length, and dropped by name when nothing is left to learn from.

This module knows no files, no model and no batches. A draft at position t predicts token t + 2 (it is fed the target's
state of t and token t + 1), so an answer counts only from its second token on: an example is used when at least two
supervised tokens stand in a row. Tokens after the last supervised one teach nothing and are cut off.

A row whose field `finish` is "length" (as `paceline synth` writes it) holds an answer that was cut before its end: the
end-of-turn token that the chat template adds to the last answer is then not the target's word and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from paceline.data.chat import ChatFormat, Encoded
from paceline.data.rows import Row, Skip, tally
from paceline.errors import ConfigError, DataError
from paceline.store.features import row_digest


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence.

    ids: [T] int64.  mask: [T] bool, True where the token is supervised: the target wrote it, or see `supervise_all`.
    digest: sha256 (hex) of ids and of what the target wrote, the key of its states.  source: "file:line" of its row.
    category: the row's category or "".
    """

    ids: Tensor
    mask: Tensor
    digest: str
    source: str
    category: str

    @property
    def num_supervised(self) -> int:
        """Tokens that are supervised."""
        return int(self.mask.sum())

    def supervise_all(self) -> Example:
        """The same tokens and the same states, all of them supervised: the target has a law behind every prefix."""
        return replace(self, mask=torch.ones_like(self.mask))


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSet:
    """Examples of a data set, the rows that gave none, how many examples were cut, and the seconds it took."""

    examples: tuple[Example, ...]
    drops: tuple[Skip, ...]
    num_cut: int
    seconds: float

    @property
    def num_tokens(self) -> int:
        """All tokens, prompts included."""
        return sum(len(example.ids) for example in self.examples)

    @property
    def num_supervised(self) -> int:
        """Tokens that the target wrote."""
        return sum(example.num_supervised for example in self.examples)

    def summary(self) -> str:
        """The closing count, one line."""
        return (
            f"{len(self.examples)} examples, {self.num_tokens} tokens, {self.num_supervised} supervised; "
            f"{self.num_cut} cut to length; {len(self.drops)} dropped{tally(self.drops)}; {self.seconds:.1f} s"
        )


def build_examples(
    rows: Iterable[Row],
    *,
    chat: ChatFormat,
    max_length: int,
    vocab_size: int | None = None,
    answers: Literal["all", "last"] = "all",
    progress: Callable[[int], None] | None = None,
) -> ExampleSet:
    """Tokenise rows, cut each to `max_length` tokens and drop those whose answer is lost, with the reason.

    vocab_size: the target's number of token ids, to refuse a foreign tokenizer.  answers: which of a row's assistant
    turns are supervised.  progress: called with the number of rows done.
    Raises DataError when no row gives an example, ConfigError when `max_length` leaves no room for one.
    """
    if max_length < 3:
        raise ConfigError(f"max_length is {max_length}; expected at least 3 tokens (a prompt and two answer tokens)")
    started = time.perf_counter()
    examples: list[Example] = []
    drops: list[Skip] = []
    num_cut = 0
    for done, row in enumerate(rows, start=1):
        try:
            encodings = chat.encode(row.messages, tools=row.tools)
        except DataError as error:
            drops.append(Skip(source=row.source, reason=str(error)))
            encodings = ()
        if encodings and row.fields.get("finish") == "length":
            encodings = (*encodings[:-1], _without_end(encodings[-1], chat))
        if answers == "last":
            encodings = tuple(map(_last_answer, encodings[-1:]))
        for encoded in encodings:
            example = _example(encoded, row, max_length=max_length, vocab_size=vocab_size)
            if isinstance(example, Example):
                examples.append(example)
                num_cut += _end(encoded.mask) > max_length
            else:
                drops.append(example)
        if progress is not None:
            progress(done)
    if not examples:
        first = f"; first: {drops[0].source}: {drops[0].reason}" if drops else ""
        raise DataError(
            f"no row is left to train on: {len(drops)} dropped{tally(drops)}{first}; raise max_length or mend them"
        )
    seconds = time.perf_counter() - started
    return ExampleSet(examples=tuple(examples), drops=tuple(drops), num_cut=num_cut, seconds=seconds)


def count_supervised(examples: Sequence[Example], *, vocab_size: int) -> Tensor:
    """How often the target wrote each token.  Returns [V] int64, from which a draft vocabulary is chosen."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += torch.bincount(example.ids[example.mask], minlength=vocab_size)
    return counts


def _example(encoded: Encoded, row: Row, *, max_length: int, vocab_size: int | None) -> Example | Skip:
    end = _end(encoded.mask)
    if not _is_learnable(encoded.mask):
        return Skip(source=row.source, reason="answer too short: fewer than two supervised tokens in a row")
    kept = encoded.mask[:max_length]
    if not _is_learnable(kept):
        return Skip(source=row.source, reason=f"answer lost by truncation at {max_length} tokens: row has {end}")
    end = _end(kept)
    ids = torch.tensor(encoded.ids[:end], dtype=torch.int64)
    if vocab_size is not None and int(ids.max()) >= vocab_size:
        raise DataError(
            f"{row.source}: token id {int(ids.max())}, the target has {vocab_size}; expected the target's own tokenizer"
        )
    mask = torch.tensor(kept[:end], dtype=torch.bool)
    return Example(ids=ids, mask=mask, digest=row_digest(ids, mask), source=row.source, category=row.category)


def _without_end(encoded: Encoded, chat: ChatFormat) -> Encoded:
    """The last answer without the end of turn that the template, not the target, has written."""
    end = _end(encoded.mask)
    closing = chat.tokenize(chat.closing)
    start = max(end - len(closing), 0)
    if not closing or encoded.ids[start:end] != closing:
        start = end - 1 if end and encoded.ids[end - 1] in chat.end_ids else end
    return Encoded(ids=encoded.ids, mask=[flag and index < start for index, flag in enumerate(encoded.mask)])


def _last_answer(encoded: Encoded) -> Encoded:
    end = _end(encoded.mask)
    before = max((index + 1 for index in range(end) if not encoded.mask[index]), default=0)
    return Encoded(ids=encoded.ids, mask=[before <= index < end for index in range(len(encoded.mask))])


def _is_learnable(mask: Sequence[bool]) -> bool:
    return any(one and two for one, two in pairwise(mask))


def _end(mask: Sequence[bool]) -> int:
    return max((index + 1 for index, flag in enumerate(mask) if flag), default=0)
