"""One call of the compiled forward over our cache; angles of positions, computed once.

It owns no weights and knows no architecture: a `Model` struct says where the weights lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.errors import TargetError
from paceline.native.library import Call, Library, Model

ANGLES = 1024  # positions computed at once; always the same ones together, so that an angle has one value


class Angles:
    """Rotary cosines and sines by position, [positions, C] float32 each, grown as they are needed.

    tables: positions [1, n] int64 -> two [1, n, C], the model's own.
    """

    def __init__(self, tables: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._tables = tables
        self.cos = self.sin = torch.empty(0)

    @torch.no_grad()
    def grow(self, positions: int) -> None:
        """Have angles for at least so many positions."""
        while len(self.cos) < positions:
            start = len(self.cos)
            cos, sin = self._tables(torch.arange(start, start + ANGLES)[None])
            width = cos.shape[-1]
            self.cos = torch.cat([self.cos.view(-1, width), cos[0].float()]).contiguous()
            self.sin = torch.cat([self.sin.view(-1, width), sin[0].float()]).contiguous()


def run(
    library: Library, model: Model, cache: KVCache, tokens: Tensor, *, depths: Tensor, mask: Tensor, angles: Angles,
    rows: Tensor, taps: tuple[int, ...] = (), features: Tensor | None = None, above: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values go into the slots behind each row's length and the `above` nodes there; nothing is committed.

    tokens, depths: [B, N] int64, depths counted from the row's length.  mask: [B, N, above + N] bool.  rows: int64 of
    any shape, places in B * N whose logits are wanted.  taps: layers.  features: [B, N, H], a draft's residual.
    Returns logits [*rows.shape, V] and layer outputs [B, N, K*H].  Raises TargetError.
    """
    batch, count = tokens.shape
    angles.grow(max(cache.lengths) + above + count)
    logits = torch.empty(*rows.shape, model.vocab)
    tapped = torch.empty(batch, count, len(taps) * model.hidden)
    kept = [tokens.contiguous(), depths.contiguous(), torch.tensor(cache.lengths)]
    start = None if features is None else features.contiguous()
    seen, wanted, tap_layers = mask.contiguous(), rows.contiguous(), torch.tensor(taps, dtype=torch.int64)
    tables, team = _buffers(cache, model), library.team
    call = Call(
        batch, count, above, cache.capacity, wanted.numel(), len(taps), torch.get_num_threads(),
        *(tensor.data_ptr() for tensor in kept), None if start is None else start.data_ptr(), seen.data_ptr(),
        angles.cos.data_ptr(), angles.sin.data_ptr(), *(ctypes.addressof(table) for table in tables),
        wanted.data_ptr(), tap_layers.data_ptr(), logits.data_ptr(), tapped.data_ptr(),
        team.parallel, team.thread_number, team.thread_count,
    )  # fmt: skip
    code = library.forward(model, call)
    if code:
        raise TargetError(_FAULTS[code])
    return logits, tapped


def _buffers(cache: KVCache, model: Model) -> tuple[Any, Any]:
    """Addresses of the cache's buffers by layer, made where a cache is new."""
    shape = (cache.batch, model.key_heads, cache.capacity, model.width)
    tables: list[Any] = []
    for buffers in (cache.keys, cache.values):
        for layer in range(model.layers):
            if layer not in buffers:
                buffers[layer] = torch.zeros(shape)
            assert buffers[layer].shape == shape and buffers[layer].is_contiguous()
        addresses = [buffers[layer].data_ptr() for layer in range(model.layers)]
        tables.append((ctypes.c_void_p * model.layers)(*addresses))
    return tables[0], tables[1]


_FAULTS = {
    1: "a token id lies outside the vocabulary",
    2: "not enough memory for the activations of a call; score fewer nodes or rows at once",
    3: "a node's depth is negative or not below the number of nodes",
}
