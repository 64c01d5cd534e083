"""One call of a sequential draft over its cache: the nodes of a tree level, or the tokens just committed.

Two runners do the same: torch eager for every draft and device, and the native forward for drafts whose layer it knows.
Neither knows how levels become a tree.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.drafts._base import DraftOutput, SequentialDraft
from paceline.drafts._native import NativeLayer
from paceline.native.build import Unavailable
from paceline.native.library import Library
from paceline.native.run import Angles, run
from paceline.ops import masks
from paceline.targets.generic import Target

ROUND = 64  # slots shown to attention: a multiple, so that few shapes occur
_LOG = logging.getLogger("paceline")


class LevelRunner(Protocol):
    """Runs nodes of a draft; their keys go behind each row's length and the `above` nodes that lie there already."""

    def __call__(
        self, cache: KVCache, tokens: Tensor, features: Tensor, *, depths: Tensor, seen: Tensor, above: int,
        wanted: Tensor,
    ) -> DraftOutput:  # fmt: skip
        """tokens: [B, n] int64.  features: [B, n, Hd], fused taps or what the parents hand on.

        depths: [B, n] int64, positions counted from the row's length.  seen: [B, n, above + n] bool, nodes behind the
        length that each node sees, itself included.  wanted: [B, m] int64, places in B * n whose logits and
        features are returned.
        """
        ...


class EagerLevel:
    """The draft's own modules."""

    def __init__(self, draft: SequentialDraft, target: Target) -> None:
        self._draft, self._target = draft, target

    def __call__(
        self, cache: KVCache, tokens: Tensor, features: Tensor, *, depths: Tensor, seen: Tensor, above: int,
        wanted: Tensor,
    ) -> DraftOutput:  # fmt: skip
        """See LevelRunner."""
        device, count = self._target.device, tokens.shape[1]
        lengths = torch.tensor(cache.lengths)
        behind = lengths[:, None] + torch.arange(above + count)
        view = min(cache.capacity, -(-(max(cache.lengths) + above + count) // ROUND) * ROUND)
        visible = masks.prefix_tree_mask(
            masks.prefix_slots(lengths, capacity=view), tree_mask=seen, tree_slots=behind, tree_positions=behind
        )
        same = min(cache.lengths) == max(cache.lengths)
        cache.place(behind[:, above:].to(device), view=view, start=cache.lengths[0] + above if same else None)
        hidden = self._draft.level(
            self._target.embed(tokens.to(device)).to(features.dtype),
            features,
            positions=(lengths[:, None] + depths).to(device),
            visible=visible.to(device),
            cache=cache,
        )
        hidden = hidden.flatten(0, 1)[wanted.to(device)]
        return DraftOutput(self._draft.logits(hidden), self._draft.onward(hidden))


class NativeLevel:
    """The compiled forward.  layer: where the draft's weights lie.  library: the one that the target runs on."""

    def __init__(self, draft: SequentialDraft, layer: NativeLayer, library: Library) -> None:
        self._layer, self._library = layer, library
        self._angles = Angles(draft.tables)

    def __call__(
        self, cache: KVCache, tokens: Tensor, features: Tensor, *, depths: Tensor, seen: Tensor, above: int,
        wanted: Tensor,
    ) -> DraftOutput:  # fmt: skip
        """See LevelRunner."""
        logits, hidden = run(
            self._library, self._layer.struct, cache, tokens, depths=depths, mask=seen, angles=self._angles,
            rows=wanted, taps=(0,), features=features, above=above,
        )  # fmt: skip
        return DraftOutput(logits, hidden.flatten(0, 1)[wanted])


def choose_level(draft: SequentialDraft, target: Target) -> LevelRunner:
    """The native runner where the target runs natively and the draft's layer is of the kind it knows."""
    library = target.library
    if library is None:
        return EagerLevel(draft, target)
    try:
        return NativeLevel(draft, NativeLayer(draft, target.embed_weight), library)
    except Unavailable as reason:
        _LOG.warning("the draft runs on torch eager, because %s", reason)
        return EagerLevel(draft, target)
