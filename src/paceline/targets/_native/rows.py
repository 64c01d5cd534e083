"""Attention in C++ for one token per row of a bfloat16 model on the processor; all else stays the model's own modules.

Attention by torch stays its slow twin: they are compared before the first use, layer by layer and in the logits.  It
knows neither drafts nor why it was chosen.

Nothing that two calls share is switched: neither the model, nor its configuration, nor a registry of transformers.  The
cache of a step shows its layers keys of a type of their own, and torch's scaled dot product over such keys is answered
here.  So a call of another thread, or of a hook in the midst of a step, has keys without that type and is torch's; and
what is done to these keys beyond that one function is refused, so no layer sees more slots than it should.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

READS = (Tensor.size, Tensor.dim, Tensor.stride)  # besides properties, what may be asked of keys
KEPT, CAPACITY = (41, 3, 20), 64  # lengths of the rows compared
LAYER_TOLERANCE = 2**-6  # of the largest number; rounding to bfloat16 is 2**-9
LOGIT_TOLERANCE = 0.25  # of the logits' standard deviation: as in the trial of families, whose 16 bits drift as much


class StepScore(Protocol):
    """`Target._score_eager`; rows: attention of one token per row."""

    def __call__(
        self, cache: TargetCache, tokens: Tensor, *, mask: Tensor, depths: Tensor, rows: RowAttention | None = None
    ) -> Scores: ...


class RowAttention:
    """Attention of one token per row for the layers of one model.

    check: called with the result and the arguments of every layer's attention.
    """

    def __init__(self, model: Any, library: Library, *, check: Callable[..., None] | None = None) -> None:
        self.library, self.check = library, check
        self._model, self._layers = model, tf.text_config(model).num_hidden_layers

    def step(self, counts: Tensor) -> RowStep:
        """One forward call; counts: how many slots each row sees, [B] int64."""
        return RowStep(self, counts, layers=self._layers)

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
        checked = RowAttention(self._model, self.library, check=_compare_layer)
        found = score(cache, last, mask=own, depths=depths, rows=checked).logits.float()
        worst = float((found - expected).abs().max() / expected.std())
        if not worst <= LOGIT_TOLERANCE:
            raise Unavailable(f"the logits of both differ by {worst:.1g} of their standard deviation")


class RowStep:
    """One forward call whose layers attend natively: to `counts[b]` slots of row b."""

    def __init__(self, rows: RowAttention, counts: Tensor, *, layers: int) -> None:
        self._rows, self._counts, self._layers = rows, counts, layers
        self._calls = 0

    def show(self, keys: Tensor) -> Tensor:
        """Keys [B, A_kv, view, C] as the layers see them."""
        shown = keys.as_subclass(_StepKeys)
        shown.step, shown.plain = self, keys
        return shown

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
        """As torch's function, each row over its own slots: [B, A, n, C], two [B, A_kv, view, C] -> [B, A, n, C]."""
        # 5.x may fold the heads of a group into n; each query sees all slots of its row, wherever it stands.
        flat, rows = query.reshape(len(query), -1, 1, query.shape[-1]), self._rows
        out = attend(rows.library, flat, keys, values, counts=self._counts, scale=scale)
        if rows.check is not None:
            rows.check(out, flat, keys, values, counts=self._counts, scale=scale)
        self._calls += 1
        return out.view(query.shape)

    def refuse_missed(self) -> None:
        """Raises Unavailable unless every layer attended by this: another would have seen slots that hold nothing."""
        if self._calls != self._layers:
            raise Unavailable(f"{self._calls} of its {self._layers} layers attend by torch's scaled dot product")


class _StepKeys(Tensor):
    """Keys of a step: torch's scaled dot product over them is the step's, their sizes can be read, and that is all."""

    step: RowStep
    plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        name = str(func.__name__)
        found = super().__torch_function__(func, types, args, kwargs) if name == "__get__" or func in READS else None
        if found is None or isinstance(found, Tensor):
            raise Unavailable(f"its layers do more with their keys than attend to them ({name})")
        return found


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Torch's `scaled_dot_product_attention` over a step's keys; the slots a row sees are the step's to say."""
    if attn_mask is not None or is_causal:
        raise Unavailable("its layers mask single tokens by a rule of their own")
    if dropout_p or scale is None:
        raise Unavailable("its attention has dropout or a scale of its own")
    if not isinstance(key, _StepKeys) or isinstance(query, _StepKeys) or isinstance(value, _StepKeys):
        raise Unavailable("its layers attend to something else than their keys")
    return key.step.attend(query, key.plain, value, scale=float(scale))


def _compare_layer(found: Tensor, query: Tensor, key: Tensor, value: Tensor, *, counts: Tensor, scale: float) -> None:
    group = query.shape[1] // key.shape[1]
    seen = torch.arange(key.shape[2]) < counts[:, None]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (key, value))
    expected = scaled_dot_product_attention(query.float(), keys, values, attn_mask=seen[:, None, None], scale=scale)
    expected = expected.transpose(1, 2)
    worst = float((found.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not worst <= LAYER_TOLERANCE:
        raise Unavailable(f"a layer's attention and torch's differ by {worst:.0e} of the largest number")
