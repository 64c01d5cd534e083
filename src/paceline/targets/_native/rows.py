"""Attention in C++ for one token per row of a bfloat16 model on the processor; all else stays the model's own modules.

Attention by torch stays its slow twin: they are compared before the first use, layer by layer and in the logits.  It
knows neither drafts nor why it was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.native.build import Unavailable
from paceline.native.library import Library
from paceline.native.rows import attend
from paceline.records import Scores
from paceline.targets import _transformers as tf
from paceline.targets._cache import TargetCache

# What layers hand to every attention function and what has no part in a step that is given its mask.
NO_PART = ("position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states")
KEPT, CAPACITY = (41, 3, 20), 64  # lengths of the rows compared
LAYER_TOLERANCE = 2**-6  # of the largest number; rounding to bfloat16 is 2**-9
LOGIT_TOLERANCE = 0.25  # of the logits' standard deviation: as in the trial of families, whose 16 bits drift as much


class StepScore(Protocol):
    """`Target._score_eager`; rows: attention of one token per row."""

    def __call__(
        self, cache: TargetCache, tokens: Tensor, *, mask: Tensor, depths: Tensor, rows: RowAttention | None = None
    ) -> Scores: ...


class RowAttention:
    """What the layers of one model call in place of torch's attention while `standing_in` is entered."""

    def __init__(self, model: Any, library: Library) -> None:
        self._model, self._library, self._layers = model, library, tf.text_config(model).num_hidden_layers
        self._calls = 0
        self._check: Callable[..., None] | None = None

    def standing_in(self) -> AbstractContextManager[None]:
        """The model attends by this, and by nothing else, until the block ends."""
        self._calls = 0
        return tf.attending_by(self._model, self._attend)

    def lengths_as_mask(self, lengths: Tensor) -> Tensor:
        """What the call takes as its mask: how many slots each row sees, [B] int64 -> [B, 1, 1, 1]."""
        return lengths[:, None, None, None]

    def refuse_missed(self) -> None:
        """Raises Unavailable unless every layer attended by this: another would have read lengths as a mask."""
        if self._calls != self._layers:
            raise Unavailable(f"{self._calls} of its {self._layers} layers attend by the function they are given")

    def compare(self, *, score: StepScore, vocab_size: int) -> None:
        """Raises Unavailable if a layer's attention or the logits differ from torch's by more than rounding."""
        generator = torch.Generator().manual_seed(0)
        batch, longest = len(KEPT), max(KEPT)
        chain = torch.randint(0, vocab_size, (batch, longest), generator=generator)
        last = torch.randint(0, vocab_size, (batch, 1), generator=generator)
        cache = TargetCache(batch, capacity=CAPACITY)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril().expand(batch, -1, -1)
        score(cache, chain, mask=causal, depths=torch.arange(longest).expand(batch, -1))
        cache.commit([range(count) for count in KEPT])
        own, depths = torch.ones(batch, 1, 1, dtype=torch.bool), torch.zeros(batch, 1, dtype=torch.int64)
        expected = score(cache, last, mask=own, depths=depths).logits.float()
        self._check = _compare_layer
        try:
            found = score(cache, last, mask=own, depths=depths, rows=self).logits.float()
        finally:
            self._check = None
        worst = float((found - expected).abs().max() / expected.std())
        if not worst <= LOGIT_TOLERANCE:
            raise Unavailable(f"the logits of both differ by {worst:.1g} of their standard deviation")

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """As transformers calls it: [B, A, 1, C], two [B, A_kv, view, C], the lengths as a mask -> [B, 1, A, C]."""
        strange = [name for name, option in options.items() if option is not None and name not in NO_PART]
        if strange or dropout or scaling is None:
            raise Unavailable(f"its attention has {', '.join(strange) or 'dropout or a scale of its own'}")
        if attention_mask is None or attention_mask.shape != (len(query), 1, 1, 1):
            raise Unavailable("its layers change the mask that they are given")
        counts = attention_mask[:, 0, 0, 0]
        out = attend(self._library, query, key, value, counts=counts, scale=float(scaling))
        if self._check is not None:
            self._check(out, query, key, value, counts=counts, scale=float(scaling))
        self._calls += 1
        return out, None


def _compare_layer(found: Tensor, query: Tensor, key: Tensor, value: Tensor, *, counts: Tensor, scale: float) -> None:
    group = query.shape[1] // key.shape[1]
    seen = torch.arange(key.shape[2]) < counts[:, None]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (key, value))
    expected = scaled_dot_product_attention(query.float(), keys, values, attn_mask=seen[:, None, None], scale=scale)
    expected = expected.transpose(1, 2)
    worst = float((found.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not worst <= LAYER_TOLERANCE:
        raise Unavailable(f"a layer's attention and torch's differ by {worst:.0e} of the largest number")
