"""The target answers prompts that somebody wrote: the first user turn of each row, behind its system turn.

Rows count from the first of the first source; those that give no prompt, and prompts that are too long, are left out by
name.  It knows sources of prompts, and nothing of the target's own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from paceline.data.answering import Answering, Job, SynthOptions
from paceline.data.prompt_sources import Prompt, Source
from paceline.data.rows import Message, Skip
from paceline.decoding.continuous import Request
from paceline.errors import DataError
from paceline.targets.generic import Target


class Given(Answering):
    """Turns the prompts of sources into rows, and stops behind the last."""

    def __init__(
        self,
        target: Target,
        *,
        options: SynthOptions,
        sources: Sequence[Source],
        on_drop: Callable[[dict[str, Any]], None],
    ) -> None:
        longest, most = options.max_prompt_tokens, target.max_positions
        self.longest = longest if most is None else min(longest, most - options.max_answer_tokens)
        super().__init__(
            target, options=options, capacity=options.max_prompt_tokens + options.max_answer_tokens, on_drop=on_drop
        )
        self.sources = sources

    def key(self, messages: list[Message]) -> str:
        """The whole prompt: one question under two system turns is two prompts."""
        return json.dumps(messages, sort_keys=True)

    def requests(self, done: Set[int]) -> Iterator[Request]:
        """One per prompt that can be answered.  Raises DataError behind the last row if there was none."""
        entries = itertools.chain.from_iterable(source.entries() for source in self.sources)
        number = 0
        for number, entry in enumerate(entries, start=1):
            if number - 1 not in done and (request := self._request(number - 1, entry)) is not None:
                yield request
        if not self.seen:
            names = ", ".join(source.label for source in self.sources)
            raise DataError(
                f"none of the {number} rows of {names} can be answered; dropped.jsonl says why. Expected prompts of up "
                f"to {self.longest} tokens; give others, or a larger --max-prompt-tokens, and another --out"
            )

    def _request(self, index: int, entry: Prompt | Skip) -> Request | None:
        """The request for an answer, or None for a row that is left out."""
        if isinstance(entry, Skip):
            return self.drop(index, entry.reason, prompt=entry.source)
        messages = list(entry.messages)
        try:
            ids = self.chat.prompt_ids(messages)
        except DataError as error:  # the template refuses it
            return self.drop(index, str(error), prompt=entry.source)
        if len(ids) > self.longest:
            return self.drop(index, f"longer than {self.longest} tokens: {len(ids)}", prompt=entry.source)
        if self.key(messages) in self.seen:
            return self.drop(index, "already asked", prompt=entry.source)
        job = Job(index, entry.category, *self.options.draw_manner(self.options.dice(index)))
        self.jobs[index] = job
        return self.answer_request(job, messages, ids=ids)
