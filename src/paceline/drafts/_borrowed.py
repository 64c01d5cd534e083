"""The target's output head in a draft that has none of its own: lent before use, never saved.

It knows no network: which hidden states the head reads is each draft's own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from paceline.drafts._base import DraftNetwork, Lender
from paceline.errors import ConfigError


class BorrowedHead(DraftNetwork):
    """A draft that speaks through the target's head.  head: [W, H], its rows of the draft's words; None until lent."""

    head: Tensor | None

    def expect_head(self) -> None:
        """Have a place for the head; called once, when the draft is made."""
        self.register_buffer("head", None, persistent=False)
        self._lent: tuple[weakref.ref[Tensor], int, float] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps the head, and asks the target anew at its next `borrow`."""
        return {**vars(self), "_lent": None}

    @torch.no_grad()
    def borrow(self, target: Lender) -> None:
        """Take the target's head rows of the draft's words, times the head's factor, in the draft's dtype.

        Rows that may be used as they are share the target's memory.  Raises ConfigError for a head that is more than
        a matrix.
        """
        factor, cap = target.head_scale
        extra = "adds a bias to its logits" if target.head_bias is not None else f"caps its logits at {cap}"
        if cap is not None or target.head_bias is not None:
            raise ConfigError(
                f"{type(self).__name__} speaks through the target's head alone, and this target {extra}; use a draft "
                "with a head of its own, such as eagle3"
            )
        source, own = target.head_weight, next(self.parameters())
        version = source._version  # pyright: ignore[reportPrivateUsage]  # a target may be trained between two calls
        is_same = self._lent is not None and self._lent[0]() is source and self._lent[1:] == (version, factor)
        if is_same and self.head is not None and (self.head.dtype, self.head.device) == (own.dtype, own.device):
            return
        vocab = self.vocab
        rows = source.detach()
        rows = rows[: vocab.size] if vocab.is_full else rows[vocab.ids.to(rows.device)]
        rows = rows if factor == 1.0 else rows * factor
        self.head = rows.to(device=own.device, dtype=own.dtype)
        self._lent = weakref.ref(source), version, factor

    @property
    def head_weight(self) -> Tensor:
        """[W, H], the target's.  Raises ConfigError before `borrow`."""
        if self.head is None:
            raise ConfigError(
                f"{type(self).__name__} has no head of its own, and no target has lent it one; call "
                "draft.borrow(target) first"
            )
        return self.head
