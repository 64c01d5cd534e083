"""The target answers prompts as it would be served, many at once: each answer is a row to train on.

Rows are a function of (seed, index) up to rounding; a stopped run goes on where it was.  Where prompts come from is the
business of `data.synth` (the target's own) and `data.given` (somebody's); nothing here knows drafts.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from paceline.data.chat import ChatFormat
from paceline.data.rows import Message, reason_kind
from paceline.decoding.continuous import ContinuousBatch, Finished, Request
from paceline.targets.generic import Target


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """How rows are written; all but the number of slots decides what they are, and stands in synth.json.

    sampled_share: share of answers that are sampled at answer_temperature; the others are greedy.
    """

    seed: int = 0
    max_prompt_tokens: int = 160
    max_answer_tokens: int = 224
    prompt_temperature: float = 0.9
    prompt_top_p: float = 0.95
    sampled_share: float = 0.25
    answer_temperature: float = 0.8
    top_k: int = 50
    slots: int = 64

    def dice(self, index: int) -> random.Random:
        """What decides about row `index`."""
        return random.Random(f"{self.seed}:{index}")

    def draw_manner(self, dice: random.Random) -> tuple[float, int]:
        """Temperature and seed of an answer."""
        temperature = self.answer_temperature if dice.random() < self.sampled_share else 0.0
        return temperature, dice.getrandbits(48)


@dataclass(frozen=True, slots=True)
class Job:
    """Row `index`: how it is answered, and, where the target writes the prompt, which kind is asked for."""

    index: int
    category: str
    temperature: float
    seed: int
    system: str = ""
    opener: str = ""


class Answering(ABC):
    """Turns prompts into rows.

    capacity: most tokens of a prompt and its answer together.  on_drop: called with what dropped.jsonl says of a prompt
    that is not answered; `dropped` counts the kinds of reasons, and `seen` holds the keys of prompts that are, so that
    none is asked twice.
    """

    def __init__(
        self, target: Target, *, options: SynthOptions, capacity: int, on_drop: Callable[[dict[str, Any]], None]
    ) -> None:
        self.target, self.options, self.capacity, self.on_drop = target, options, capacity, on_drop
        self.tokenizer, self.chat = target.tokenizer, ChatFormat(target.tokenizer)
        self.dropped: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.jobs: dict[int, Job] = {}
        self._asked: dict[int, list[Message]] = {}
        eos = {self.tokenizer.eos_token_id}
        configured = target.model.generation_config.eos_token_id
        eos.update(configured if isinstance(configured, list) else [configured])
        self.stop_ids = frozenset(token for token in eos if token is not None)

    @abstractmethod
    def key(self, messages: list[Message]) -> str:
        """What two prompts share that are not both asked.  Raises KeyError, IndexError for messages that are none."""

    @abstractmethod
    def requests(self, done: Set[int]) -> Iterator[Request]:
        """The first request of every row whose index is not done, made when a slot is free for it."""

    def next_request(self, written: Finished) -> Request | None:
        """What follows a finished request that was no answer: another, or None when its prompt is dropped."""
        raise AssertionError(f"nobody asked for {written.request.key}")

    def rows(self, done: Set[int]) -> Iterator[dict[str, Any]]:
        """Finished rows in the order in which they end; stops when no request is left and all started rows ended."""
        slots, requests = self.options.slots, self.requests(done)
        batch = ContinuousBatch(self.target, slots=slots, capacity=self.capacity)
        batch.submit(request for _, request in zip(range(slots), requests, strict=False))
        for finished in batch.run():
            for item in finished:
                kind, index = item.request.key  # type: ignore[misc]
                if kind == "answer":
                    yield self._row(self.jobs.pop(index), item)
                elif (request := self.next_request(item)) is not None:
                    batch.submit([request])
            batch.submit(request for _, request in zip(range(batch.free), requests, strict=False))

    def answer_request(self, job: Job, messages: list[Message], *, ids: list[int]) -> Request:
        """Ask for the answer to `messages`, whose ids as served are `ids`."""
        self.seen.add(self.key(messages))
        self._asked[job.index] = messages
        return Request(
            key=("answer", job.index),
            ids=ids,
            max_new_tokens=self.options.max_answer_tokens,
            stop_ids=self.stop_ids,
            temperature=job.temperature,
            top_k=self.options.top_k,
            seed=job.seed + 1,
        )

    def drop(self, index: int, why: str, **more: str) -> None:
        """Give up a prompt.  more: what else dropped.jsonl says of it."""
        self.dropped[reason_kind(why)] += 1
        self.on_drop({"index": index, "reason": why, **more})

    def _row(self, job: Job, answer: Finished) -> dict[str, Any]:
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return {
            "index": job.index,
            "category": job.category,
            "messages": [*self._asked.pop(job.index), {"role": "assistant", "content": text}],
            "temperature": job.temperature,
            "finish": answer.reason,
            "answer_tokens": len(answer.tokens),
        }
