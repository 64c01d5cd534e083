"""What every draft offers to decoding and training, so that neither needs to know which draft runs.

Two kinds exist here: a *sequential* draft is a small network that continues hidden states of the target one tree level
at a time; a *lookup* draft has no weights and continues ids.  Neither knows trees, verification or options.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from paceline.cache import KVCache
from paceline.ops.vocab import DraftVocab


class DraftConfig(BaseModel):
    """Base of every draft's configuration: stored in draft.toml, strict, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a draft needs to know of a target to be built for it: sizes, positions, special ids. No weights.

    rope: the target's rotary settings as found in its configuration (either key layout).
    special_ids: ids that must always be in a reduced draft vocabulary (end of turn, end of text, ...).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: dict[str, object]
    special_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """What a draft says after some nodes.

    logits: [B, n, W] over the draft vocabulary.  hidden: [B, n, Hd], fed to the children of these nodes.
    """

    logits: Tensor
    hidden: Tensor


class SequentialDraft(nn.Module):
    """A draft network that is fed one tree level at a time; `embed` is lent by the target and never saved.

    taps: target layers whose outputs it reads, side by side.  vocab: its vocabulary.  max_positions: longest context
    for which its rotary table was made.
    """

    taps: tuple[int, ...]
    vocab: DraftVocab
    max_positions: int

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """Target features [B, n, K*H] -> the draft's feature space [B, n, Hd]."""

    @abstractmethod
    def level(
        self, embeds: Tensor, features: Tensor, *, positions: Tensor, visible: Tensor, cache: KVCache
    ) -> DraftOutput:
        """Run nodes whose cache slots have been placed.

        embeds: [B, n, H] embeddings of the nodes' tokens.  features: [B, n, Hd], fused taps or the parent's hidden.
        positions: [B, n] int64.  visible: [B, 1, n, view] bool, cache slots each node may attend to (its own included).
        """


class LookupDraft(Protocol):
    """A draft without weights: continues token ids by looking at them."""

    def continuations(self, context: Sequence[int], *, length: int, count: int) -> list[list[int]]:
        """Up to `count` candidate continuations of up to `length` ids each, best first; may be empty."""
        ...


@dataclass(frozen=True, slots=True)
class DraftPlugin:
    """What a file in this folder exports as PLUGIN.

    config: the configuration's type.  configure: (facts, options of the recipe) -> configuration.
    build: (configuration, ids of the draft vocabulary or None for a draft without one) -> draft with fresh weights.
    """

    config: type[DraftConfig]
    configure: Callable[[TargetFacts, dict[str, object]], DraftConfig]
    build: Callable[[DraftConfig, DraftVocab | None], SequentialDraft | LookupDraft]
