"""One call of the native forward over our cache: same arguments, same result as the eager call, in float32.

It owns no weights: it reads the model's own, where they lie.  What it adds to memory is a table of rotary angles.
It knows neither drafts nor why it was chosen.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.errors import TargetError
from paceline.records import Scores
from paceline.targets._native.build import Unavailable
from paceline.targets._native.library import Call, Library
from paceline.targets._native.parts import Parts

ANGLES = 1024  # positions computed at once; always the same ones together, so that an angle has one value


class NativeForward:
    """The native forward of one model.  Raises Unavailable where its rotary angles are not of a kind that it knows."""

    def __init__(self, model: Any, parts: Parts, library: Library) -> None:
        self._model, self._parts, self._library = model, parts, library
        self._cos = self._sin = torch.empty(0)
        self._grow_angles(1)

    @torch.no_grad()
    def score(
        self,
        cache: KVCache,
        tokens: Tensor,
        *,
        mask: Tensor,
        depths: Tensor,
        logit_rows: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """As `Target.score`: keys and values go into the slots behind each row's length, nothing is committed.

        tokens, depths: [B, N] int64.  mask: [B, N, N] bool.  logit_rows: [M] int64 or None for all.  taps: layers.
        Raises Unavailable when the model was changed into one that the native forward does not know.
        """
        if not self._parts.is_current():
            self._parts = Parts(self._model)
            self._cos = self._sin = torch.empty(0)
        parts, (batch, count) = self._parts, tokens.shape
        self._grow_angles(max(cache.lengths) + count)
        rows = torch.arange(batch * count).view(batch, count)
        if logit_rows is not None:
            rows = rows[:, logit_rows]
        logits = torch.empty(*rows.shape, parts.vocab)
        tapped = torch.empty(batch, count, len(taps) * parts.hidden)
        kept = [tokens.contiguous(), depths.contiguous(), torch.tensor(cache.lengths), mask.contiguous()]
        tables = self._buffers(cache)
        tap_layers, wanted, team = torch.tensor(taps, dtype=torch.int64), rows.contiguous(), self._library.team
        call = Call(
            batch, count, cache.capacity, wanted.numel(), len(taps), torch.get_num_threads(),
            *(tensor.data_ptr() for tensor in kept), self._cos.data_ptr(), self._sin.data_ptr(),
            *(ctypes.addressof(table) for table in tables), wanted.data_ptr(), tap_layers.data_ptr(),
            logits.data_ptr(), tapped.data_ptr(),
            team.parallel, team.thread_number, team.thread_count,
        )  # fmt: skip
        code = self._library.forward(parts.struct, call)
        if code:
            raise TargetError(_FAULTS[code])
        return Scores(logits, tapped if taps else None)

    def _buffers(self, cache: KVCache) -> tuple[Any, Any]:
        """Addresses of the cache's buffers by layer, made where a cache is new."""
        parts = self._parts
        shape = (cache.batch, parts.key_heads, cache.capacity, parts.width)
        tables: list[Any] = []
        for buffers in (cache.keys, cache.values):
            for layer in range(parts.layers):
                if layer not in buffers:
                    buffers[layer] = torch.zeros(shape)
                assert buffers[layer].shape == shape and buffers[layer].is_contiguous()
            addresses = [buffers[layer].data_ptr() for layer in range(parts.layers)]
            tables.append((ctypes.c_void_p * parts.layers)(*addresses))
        return tables[0], tables[1]

    def _grow_angles(self, positions: int) -> None:
        """Extend cos and sin, each [positions, C], by what the model's own rotary module says."""
        while len(self._cos) < positions:
            start = len(self._cos)
            where = torch.arange(start, start + ANGLES)[None]
            cos, sin = self._parts.rotary(torch.zeros(1, 1, 1), where)
            if cos.shape[-1] != self._parts.width:
                raise Unavailable(f"it rotates {cos.shape[-1]} of the {self._parts.width} numbers of a head")
            self._cos = torch.cat([self._cos.view(-1, self._parts.width), cos[0].float()]).contiguous()
            self._sin = torch.cat([self._sin.view(-1, self._parts.width), sin[0].float()]).contiguous()


_FAULTS = {
    1: "a token id lies outside the target's vocabulary",
    2: "not enough memory for the target's activations; score fewer nodes or rows at once",
    3: "a node's depth is negative or not below the number of nodes",
}
