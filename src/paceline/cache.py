"""One owner of the cached length: fixed key/value buffers, rows of different lengths, commit and roll back.

It stores every position (a sliding window is a matter of the mask, never of the storage), so that rolling back is
forgetting a number.  It knows neither models nor trees; a caller says into which slots the next call writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import TargetError


class KVCache:
    """Key/value rows of B sequences with a length each.

    Slot s of row b holds position s for s < lengths[b]; what lies behind is scratch.  Buffers are made at the first
    call of a layer, [B, A_kv, capacity, C], in the dtype of the keys; zeros, because a masked NaN is still a NaN.
    """

    def __init__(self, batch: int, *, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.lengths = [0] * batch
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.view = capacity
        self._slots: Tensor | None = None
        self._start: int | None = None

    def ensure(self, capacity: int) -> None:
        """Have room for so many slots: buffers at least double when they grow, so that each row is copied rarely."""
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, 2 * self.capacity)
        for buffers in (self.keys, self.values):
            for layer, old in buffers.items():
                batch, heads, slots, width = old.shape
                buffers[layer] = old.new_zeros(batch, heads, self.capacity, width)
                buffers[layer][:, :, :slots] = old

    def place(self, slots: Tensor, *, view: int, start: int | None = None) -> None:
        """Say where the next call writes: slots [B, n] int64; `view` slots are shown to attention.

        start: the first slot when all rows write the same contiguous slots (a plain copy instead of a scatter).
        """
        self._slots, self.view, self._start = slots, view, start

    def write(self, layer_idx: int, *, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, A_kv, n, C] into the placed slots; returns the shown buffers [B, A_kv, view, C]."""
        if layer_idx not in self.keys:
            batch, heads, _rows, width = keys.shape
            self.keys[layer_idx] = keys.new_zeros(batch, heads, self.capacity, width)
            self.values[layer_idx] = values.new_zeros(batch, heads, self.capacity, values.shape[-1])
        all_keys, all_values = self.keys[layer_idx], self.values[layer_idx]
        if self._start is not None:
            end = self._start + keys.shape[2]
            all_keys[:, :, self._start : end] = keys
            all_values[:, :, self._start : end] = values
        else:
            assert self._slots is not None, "place() must be called before the model"
            rows = torch.arange(self.batch, device=keys.device)[:, None]
            all_keys[rows, :, self._slots] = keys.transpose(1, 2)
            all_values[rows, :, self._slots] = values.transpose(1, 2)
        return all_keys[:, :, : self.view], all_values[:, :, : self.view]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the scratch rows `kept[b]` (offsets behind lengths[b], ascending), made contiguous; forget the rest."""
        for row, offsets in enumerate(kept):
            start = self.lengths[row]
            if any(offset != place for place, offset in enumerate(offsets)):
                self._move(row, [start + offset for offset in offsets], start)
            self.lengths[row] = start + len(offsets)
        assert max(self.lengths, default=0) <= self.capacity

    def roll_back(self, row: int, *, length: int) -> None:
        """Forget everything of a row from `length` on."""
        assert length <= self.lengths[row]
        self.lengths[row] = length

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop every sequence but `rows`, in that order."""
        index = torch.tensor(list(rows))
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[index.to(buffer.device)]
        self.lengths = [self.lengths[row] for row in rows]
        self.batch = len(self.lengths)

    def adopt(self, row: int, other: KVCache, *, source: int) -> None:
        """Replace a sequence by sequence `source` of another cache of the same model."""
        length = other.lengths[source]
        if length > self.capacity:
            raise TargetError(f"a sequence of {length} tokens does not fit a cache of {self.capacity} slots")
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, buffer in theirs.items():
                if layer not in mine:
                    mine[layer] = buffer.new_zeros(self.batch, buffer.shape[1], self.capacity, buffer.shape[3])
                mine[layer][row, :, :length] = buffer[source, :, :length]
        self.lengths[row] = length

    def _move(self, row: int, sources: Sequence[int], start: int) -> None:
        index = torch.tensor(list(sources))
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                buffer[row, :, start : start + len(sources)] = buffer[row][:, index.to(buffer.device)]
