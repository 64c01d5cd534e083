"""The native forward of one model: same arguments, same result as the eager call, in float32.

It owns no weights: it reads the model's own, where they lie.  What it adds to memory is a table of rotary angles.
It knows neither drafts nor why it was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.native.build import Unavailable
from paceline.native.library import Library
from paceline.native.run import Angles, run
from paceline.records import Scores
from paceline.targets._native.parts import Parts


class NativeForward:
    """The native forward of one model.  Raises Unavailable where its rotary angles are not of a kind that it knows."""

    def __init__(self, model: Any, parts: Parts, library: Library) -> None:
        self._model, self._parts, self.library = model, parts, library
        self._angles = Angles(self._tables)
        self._angles.grow(1)

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
            self._angles = Angles(self._tables)
            self._angles.grow(1)
        rows = torch.arange(tokens.numel()).view(tokens.shape)
        if logit_rows is not None:
            rows = rows[:, logit_rows]
        logits, tapped = run(
            self.library, self._parts.struct, cache, tokens, depths=depths, mask=mask, angles=self._angles, rows=rows,
            taps=taps,
        )  # fmt: skip
        return Scores(logits, tapped if taps else None)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What the model's own rotary module says."""
        cos, sin = self._parts.rotary(torch.zeros(1, 1, 1), positions)
        if cos.shape[-1] != self._parts.width:
            raise Unavailable(f"it rotates {cos.shape[-1]} of the {self._parts.width} numbers of a head")
        return cos, sin
