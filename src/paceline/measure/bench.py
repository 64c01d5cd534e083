"""The benchmark: every prompt through every decoder in one run, the order turning from prompt to prompt.

Interleaving makes the machine's moods hit all decoders alike.  Outputs are compared with the plain one on the spot.  It
knows no metric and writes no record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.data.chat import ChatFormat
from paceline.decoding.api import generate
from paceline.errors import DataError
from paceline.measure.ledger import Ledger, Mismatch, Observation
from paceline.measure.metrics import Measured, measured
from paceline.measure.systems import PLAIN, Sampling, System
from paceline.measure.workloads import Conversation, Workload, ids_digest, with_answers
from paceline.targets.generic import Target


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a benchmark is run.

    all_turns: ask the follow-ups too, after the target's own answers.  warmup: prompts that are decoded first and not
    counted.  seed: prompt i draws from seed + i when sampling.
    """

    sampling: Sampling
    all_turns: bool = False
    warmup: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything a run needs.  systems: the plain decoder first.  chat: how prompts are rendered."""

    target: Target
    chat: ChatFormat
    systems: Sequence[System]
    protocol: Protocol

    def __post_init__(self) -> None:
        assert self.systems[0].name == PLAIN, "every figure is measured against the plain loop"

    def warm_up(self, workload: Workload) -> None:
        """Decode a few prompts, short to long, with every decoder, and forget what came of it."""
        for conversation in _spread(self._fitting(workload), self.protocol.warmup):
            ids = self.chat.prompt_ids(conversation.prompt.messages)
            for system in self.systems:
                system.decode(ids, self.protocol.seed)

    def remaining(self, workload: Workload, *, ledger: Ledger) -> list[Conversation]:
        """Conversations that are not in the ledger yet.  Raises DataError when no prompt fits the target's context."""
        return [each for each in self._fitting(workload) if each.number not in ledger.done]

    def run(self, workload: Workload, *, ledger: Ledger) -> Iterator[list[Observation]]:
        """Yields the observations of each remaining conversation once they are in the ledger."""
        for conversation in self.remaining(workload, ledger=ledger):
            observations = list(self._conversation(conversation))
            ledger.add(conversation.number, observations)
            yield observations

    def too_long(self, workload: Workload) -> list[Conversation]:
        """Conversations whose first prompt and answer do not fit the target's context."""
        return [each for each in workload.conversations if not self._fits(self.chat.prompt_ids(each.prompt.messages))]

    def _fitting(self, workload: Workload) -> list[Conversation]:
        long = {each.number for each in self.too_long(workload)}
        fitting = [each for each in workload.conversations if each.number not in long]
        if not fitting:
            raise DataError(
                f"no prompt fits: the target takes {self.target.max_positions} tokens, prompt and "
                f"{self.protocol.sampling.max_new_tokens} new ones together"
            )
        return fitting

    def _fits(self, ids: list[int]) -> bool:
        limit = self.target.max_positions
        return limit is None or len(ids) + self.protocol.sampling.max_new_tokens <= limit

    def _conversation(self, conversation: Conversation) -> Iterator[Observation]:
        answers: list[str] = []
        turns = 1 + (len(conversation.prompt.follow_ups) if self.protocol.all_turns else 0)
        for turn in range(turns):
            ids = self.chat.prompt_ids(with_answers(conversation.prompt, answers))
            if turn and not self._fits(ids):
                return
            observation, plain = self._observe(conversation, turn, ids)
            yield observation
            answers.append(str(self.chat.tokenizer.decode(plain, skip_special_tokens=True)))

    def _observe(self, conversation: Conversation, turn: int, ids: list[int]) -> tuple[Observation, list[int]]:
        results: dict[str, Measured] = {}
        outputs: dict[str, list[int]] = {}
        shift = (conversation.number + turn) % len(self.systems)
        for system in [*self.systems[shift:], *self.systems[:shift]]:
            outputs[system.name], results[system.name] = self._time(system, ids, conversation.number)
        plain = outputs[PLAIN]
        mismatches: dict[str, Mismatch] = {}
        if self.protocol.sampling.is_greedy:
            for name, tokens in outputs.items():
                if tokens != plain:
                    mismatches[name] = self._mismatch(ids, plain, tokens)
        observation = Observation(
            conversation=conversation.number, turn=turn, file=conversation.file, line=conversation.line,
            prompt_tokens=len(ids), prompt_digest=ids_digest(ids), results=results, mismatches=mismatches,
        )  # fmt: skip
        return observation, plain

    def _time(self, system: System, ids: list[int], number: int) -> tuple[list[int], Measured]:
        self._finish_device_work()
        start = time.perf_counter()
        tokens, stats = system.decode(ids, self.protocol.seed + number)
        self._finish_device_work()
        return tokens, measured(stats, tokens=len(tokens), wall=time.perf_counter() - start)

    def _finish_device_work(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _mismatch(self, ids: list[int], plain: list[int], other: list[int]) -> Mismatch:
        """Where two greedy outputs part, and how near to a tie the target's logits were there."""
        pairs = zip(plain, other, strict=False)
        position = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(plain), len(other)))
        again = generate(self.target, [*ids, *plain[:position]], max_new_tokens=1, temperature=0, output_logits=True)
        logits = again.rows[0].logits
        assert logits is not None
        best, second = logits[0].topk(2).values.tolist()  # sync
        step = torch.finfo(self.target.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-30)))
        return Mismatch(position, _token(plain, position), _token(other, position), best - second, step)


def _token(tokens: list[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """Up to `count` conversations from the shortest to the longest first prompt, evenly spread."""
    ordered = sorted(conversations, key=lambda each: len(str(each.prompt.messages)))
    count = min(count, len(ordered))
    if count < 2:
        return ordered[-count:] if count else []
    return [ordered[round(place * (len(ordered) - 1) / (count - 1))] for place in range(count)]
