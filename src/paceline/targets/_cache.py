"""Our cache in transformers' clothes: what a model's attention layers ask of a cache, answered by ours.

It adds no rule: an explicit 4-D mask, or a query of one token, makes the answers to the size questions irrelevant.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers.cache_utils import Cache

from paceline.cache import KVCache


class TargetCache(KVCache, Cache):
    """The key/value rows of a target, handed to its forward call.

    show_keys: what a step makes of the keys before its layers see them; None outside of such a step.
    """

    def __init__(self, batch: int, *, capacity: int) -> None:
        Cache.__init__(self, layers=[])
        KVCache.__init__(self, batch, capacity=capacity)
        self.show_keys: Callable[[Tensor], Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write into the placed slots; returns the shown buffers, each [B, A_kv, view, C]."""
        keys, values = self.write(layer_idx, keys=key_states, values=value_states)
        return (keys if self.show_keys is None else self.show_keys(keys)), values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed length in tokens."""
        return max(self.lengths, default=0)

    def get_mask_sizes(self, *_: object, **__: object) -> tuple[int, int]:
        """(slots shown, offset)."""
        return self.view, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Slots of a row."""
        return self.capacity

    @property
    def is_compileable(self) -> bool:
        """False: compilation is decided by the target, not by transformers."""
        return False
