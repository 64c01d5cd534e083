"""Named prompt sets: files or Hub sets of conversations, the first few of each, as the target is served them.

It knows files and chat templates, not what is measured on them.  A follow-up turn is asked after the target's own
answers, so its prompt exists only once those are decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.prompt_sources import Prompt, open_sources, read_prompts, row_number


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt and its follow-ups.

    number: its place in the workload.  file: label of its source.  line: where it stands there.
    """

    number: int
    file: str
    line: int
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of one or more sources, in order.

    files: label of a source -> SHA-256 of the whole file, or commit of the data set.
    skipped: "file:line: reason" of lines that gave no prompt.
    """

    conversations: tuple[Conversation, ...]
    files: dict[str, str]
    skipped: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Rows that were read, those that gave no prompt among them."""
        return len(self.conversations) + len(self.skipped)


def load_workload(sources: Sequence[Path | str], *, prompts_per_file: int) -> Workload:
    """The first prompts of each file or Hub source.

    Raises DataError: a source that is missing, given twice, or without a prompt; ConfigError as `open_sources`.
    """
    opened = open_sources(sources)
    conversations: list[Conversation] = []
    skipped: list[str] = []
    for source in opened:
        reading = read_prompts(source, limit=prompts_per_file)
        for prompt in reading.prompts:
            conversations.append(Conversation(len(conversations), source.label, row_number(prompt.source), prompt))
        skipped += [f"{skip.source}: {skip.reason}" for skip in reading.skips]
    return Workload(tuple(conversations), {source.label: source.digest for source in opened}, tuple(skipped))


def with_answers(prompt: Prompt, answers: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """The messages of turn len(answers): the first turn, then the target's answers and the follow-ups between them."""
    messages: list[dict[str, Any]] = [*prompt.messages]
    for answer, follow_up in zip(answers, prompt.follow_ups, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    return tuple(messages)


def ids_digest(ids: Sequence[int]) -> str:
    """SHA-256 (hex) of a prompt's token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def combined_digest(digests: Iterable[str]) -> str:
    """SHA-256 (hex) of prompts' digests, in order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
