"""Named prompt sets: files of conversations, the first few of each, as the target is served them.

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

from paceline.data.prompt_sources import Prompt, read_prompts
from paceline.errors import DataError
from paceline.store.manifest import file_digests


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt and its follow-ups.

    number: its place in the workload.  file: label of its file.  line: where it stands there.
    """

    number: int
    file: str
    line: int
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of one or more files, in order.

    files: label -> SHA-256 of the whole file.  skipped: "file:line: reason" of lines that gave no prompt.
    """

    conversations: tuple[Conversation, ...]
    files: dict[str, str]
    skipped: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Rows that were read, those that gave no prompt among them."""
        return len(self.conversations) + len(self.skipped)


def load_workload(paths: Sequence[Path], *, prompts_per_file: int) -> Workload:
    """The first prompts of each file.  Raises DataError: a file that is missing, given twice, or without a prompt."""
    twice = sorted({path.name for path in paths if list(paths).count(path) > 1})
    if twice:
        raise DataError(f"{twice[0]} is given twice; name each workload file once")
    readings = [read_prompts(path, limit=prompts_per_file) for path in paths]
    files = file_digests(paths)
    conversations: list[Conversation] = []
    skipped: list[str] = []
    for label, reading in zip(files, readings, strict=True):
        for prompt in reading.prompts:
            conversations.append(Conversation(len(conversations), label, _line(prompt.source), prompt))
        skipped += [f"{label}:{_line(skip.source)}: {skip.reason}" for skip in reading.skips]
    return Workload(tuple(conversations), files, tuple(skipped))


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


def _line(source: str) -> int:
    """The line number at the end of "folder/file:line"; folders are left behind."""
    return int(source.rpartition(":")[2])
