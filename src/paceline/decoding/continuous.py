"""Plain batched decoding with refilled slots: many short requests, one target call per step.

Made for writing data, where throughput counts and no draft exists yet.  It knows no files and no chat templates; the
draws of a request depend on its own seed only, never on its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.errors import TargetError
from paceline.ops.sampling import first_best
from paceline.targets.generic import Target


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    ids: prompt token ids.  temperature 0 = greedy.  top_k applies when sampling.  stop_ids end the request, and stay.
    """

    key: object
    ids: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's new tokens (with the stop token, if one ended it) and why it ended: `stop` or `length`."""

    request: Request
    tokens: list[int]
    reason: str


@dataclass(slots=True)
class _Slot:
    request: Request
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)


def sample_rows(logits: Tensor, *, temperature: Tensor, top_k: int, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row, by inverse CDF of the filtered law (temperature, top-k, top-p); greedy where temperature is 0.

    logits: [B, V].  temperature, top_p, uniforms: [B] float32.  Returns [B] int64.  Raises TargetError for NaN.
    """
    hot = temperature > 0
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    best[~hot] = first_best(logits[~hot])
    _refuse_nan(logits[~hot].gather(-1, best[~hot, None]))
    if not bool(hot.any()):
        return best
    values, ids = logits[hot].topk(min(top_k, logits.shape[-1]), dim=-1)  # descending
    _refuse_nan(values[:, :1])
    law = torch.softmax(values.float() / temperature[hot][:, None], dim=-1)
    before = law.cumsum(dim=-1) - law
    law = law.masked_fill(before >= top_p[hot][:, None], 0.0)
    cumulative = law.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniforms[hot][:, None] * cumulative[:, -1:], right=True)
    drawn = drawn.clamp_max((law > 0).sum(dim=-1, keepdim=True) - 1)
    best[hot] = ids.gather(-1, drawn)[:, 0]
    return best


def _refuse_nan(largest: Tensor) -> None:
    """largest: [B, 1], the largest logit of each row; torch puts a NaN above every number."""
    if bool(largest.isnan().any()):
        raise TargetError("the target's logits are not numbers; check its weights and dtype")


class ContinuousBatch:
    """Decodes a stream of requests in up to `slots` rows; a row is refilled when its request ends.

    target: the model.  capacity: most tokens of a request, prompt and answer together.
    """

    def __init__(self, target: Target, *, slots: int, capacity: int, refill: int = 4) -> None:
        self.target = target
        self.cache = target.new_cache(slots, capacity=capacity)
        self.refill = refill
        self._slots: list[_Slot | None] = [None] * slots
        self._next = torch.zeros(slots, 1, dtype=torch.int64)
        self._waiting: deque[Request] = deque()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; each must fit the capacity."""
        for request in requests:
            assert len(request.ids) + request.max_new_tokens <= self.cache.capacity, "request exceeds the capacity"
            self._waiting.append(request)

    @property
    def free(self) -> int:
        """Rows without a request, less the requests that wait for one."""
        return sum(slot is None for slot in self._slots) - len(self._waiting)

    def run(self) -> Iterator[list[Finished]]:
        """Yields after every step the requests that ended in it, until nothing runs and nothing waits.

        The caller may submit more between steps.
        """
        while any(self._slots) or self._waiting:
            finished = self._admit()
            if any(self._slots):
                finished += self._step()
            yield finished

    def _admit(self) -> list[Finished]:
        empty = [row for row, slot in enumerate(self._slots) if slot is None]
        if not self._waiting or not empty:
            return []
        if any(self._slots) and len(empty) < self.refill and len(self._waiting) > len(empty):
            return []
        batch = [self._waiting.popleft() for _ in range(min(len(empty), len(self._waiting)))]
        scratch = self.target.new_cache(len(batch), capacity=max(len(request.ids) for request in batch))
        scores = self.target.prefill(scratch, [torch.tensor(request.ids) for request in batch])
        rows = empty[: len(batch)]
        for source, (row, request) in enumerate(zip(rows, batch, strict=True)):
            self.cache.adopt(row, scratch, source=source)
            uniforms = np.random.default_rng(request.seed).random(request.max_new_tokens, dtype=np.float32)
            self._slots[row] = _Slot(request, uniforms)
        return self._append(rows, scores.logits[:, 0])

    def _step(self) -> list[Finished]:
        ones = torch.ones(len(self._slots), 1, 1, dtype=torch.bool)
        depths = torch.zeros(len(self._slots), 1, dtype=torch.int64)
        scores = self.target.score(self.cache, self._next, mask=ones, depths=depths)
        live = [row for row, slot in enumerate(self._slots) if slot is not None]
        self.cache.commit([range(1) if slot is not None else range(0) for slot in self._slots])
        return self._append(live, scores.logits[live, 0])

    def _append(self, rows: list[int], logits: Tensor) -> list[Finished]:
        slots = [slot for slot in (self._slots[row] for row in rows) if slot is not None]
        tokens = sample_rows(
            logits,
            temperature=torch.tensor([slot.request.temperature for slot in slots], device=logits.device),
            top_k=max(slot.request.top_k for slot in slots),
            top_p=torch.tensor([slot.request.top_p for slot in slots], device=logits.device),
            uniforms=torch.tensor([float(slot.uniforms[len(slot.tokens)]) for slot in slots], device=logits.device),
        ).tolist()  # sync
        finished: list[Finished] = []
        for row, slot, token in zip(rows, slots, tokens, strict=True):
            slot.tokens.append(token)
            self._next[row, 0] = token
            stopped = token in slot.request.stop_ids
            if stopped or len(slot.tokens) == slot.request.max_new_tokens:
                finished.append(Finished(slot.request, slot.tokens, "stop" if stopped else "length"))
                self._slots[row] = None
                self.cache.roll_back(row, length=0)
        return finished
