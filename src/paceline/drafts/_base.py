"""What every draft offers to decoding and training, so that neither needs to know which draft runs.

Three kinds exist here: a *sequential* draft is a small network that continues hidden states of the target one tree
level at a time; a *block* draft says several positions at once; a *lookup* draft has no weights and continues ids.
None knows trees, verification or options.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from paceline.cache import KVCache
from paceline.config import Section
from paceline.drafts._layers import Attention, LayerParts
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts

# (layer, queries [B, A, n, C], keys and values of the block [B, A_kv, n, C] each) -> mixed values [B, A, n, C].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DraftConfig(Section):
    """Base of every draft's configuration: stored in draft.toml, strict, frozen.

    A field says what it may hold, so that a recipe, a folder and a foreign format are refused alike.
    """


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """What a draft says after some nodes.

    logits: [B, n, W] over the draft vocabulary.  hidden: [B, n, Hd], the features of these nodes' children.
    """

    logits: Tensor
    hidden: Tensor


class DraftNetwork(nn.Module):
    """A draft with weights: what sequential and block drafts have in common.

    Embeddings are lent by the target and never saved; so is the head of a draft that has none of its own.
    taps: what it reads of the target, side by side: outputs of decoder layers, and `num_layers` for the last hidden
    state after the final norm.  target_width: H, numbers of one of them.  vocab: its vocabulary.  max_positions:
    longest context for which it was made.
    """

    taps: tuple[int, ...]
    target_width: int
    max_positions: int

    @property
    @abstractmethod
    def vocab(self) -> DraftVocab:
        """The words it can say, read from its weights."""

    @abstractmethod
    def initialise(self, head: Tensor, *, tap_sizes: Sequence[float]) -> None:
        """Start from the target instead of from chance alone.

        head: [V, H], its head.  tap_sizes: for each tap the usual root mean square of a token's features.
        """

    def borrow(self, target: Lender) -> None:
        """Take what is the target's, before decoding and before training; nothing for a draft that owns all it needs.

        Raises ConfigError for a target whose head it cannot use.
        """

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """Target features [..., K*H] -> the draft's feature space [..., Hd]."""

    @abstractmethod
    def head_input(self, hidden: Tensor) -> Tensor:
        """What the head reads of a hidden state."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """[W, Hd] rows of the head, without bias."""

    def misfit(self, *, num_layers: int, width: int) -> str:
        """Why it cannot read a target of so many layers and that width; "" when it can."""
        if self.target_width == width and all(0 <= tap <= num_layers for tap in self.taps):
            return ""
        return (
            f"it reads layers {', '.join(map(str, self.taps))} of width {self.target_width}; the target has layers 0 "
            f"to {num_layers - 1} of width {width}"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden's width] -> [..., W]."""
        return nn.functional.linear(self.head_input(hidden), self.head_weight)


class Lender(Protocol):
    """The part of a target that drafts borrow from."""

    @property
    def head_weight(self) -> Tensor:
        """[V, H] weight of the output head."""
        ...

    @property
    def head_bias(self) -> Tensor | None:
        """[V] bias of the output head, where the model has one."""
        ...

    @property
    def head_scale(self) -> tuple[float, float | None]:
        """(factor, cap): logits = weight @ hidden * factor, then cap * tanh(logits / cap) where there is a cap."""
        ...


class SequentialDraft(DraftNetwork):
    """A one-layer draft network that is fed its own output, one tree level or one unroll step at a time.

    Its parts are apart, so that decoding (`level`, over a cache) and training (`training/unroll.py`, over a batch) run
    the same ones.  attention: the projections of its layer.
    """

    attention: Attention

    @abstractmethod
    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """embeds [..., H] of the tokens, features [..., Hd] -> (what attention projects [..., in_width], residual)."""

    @abstractmethod
    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines for positions [B, n] -> two [B, n, C]."""

    @abstractmethod
    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Residual and MLP: residual and attention output [..., Hd] -> hidden [..., Hd or wider]."""

    def onward(self, hidden: Tensor) -> Tensor:
        """The features that a hidden state hands to the next step: [..., Hd]; all of it, unless a draft says both."""
        return hidden

    def layer_parts(self) -> LayerParts | None:
        """For the native forward, which runs `level`, `head_input` and the head as one call; None for other layers."""
        return None

    def level(self, embeds: Tensor, features: Tensor, *, positions: Tensor, visible: Tensor, cache: KVCache) -> Tensor:
        """Run nodes whose cache slots have been placed; returns their hidden states [B, n, ...].

        embeds: [B, n, H] embeddings of the nodes' tokens.  features: [B, n, Hd], fused taps or what the parents hand
        on.  positions: [B, n] int64.  visible: [B, 1, n, view] bool, cache slots each node may attend to (its own too).
        """
        cos, sin = self.tables(positions)
        inputs, residual = self.enter(embeds, features)
        keys, values = self.attention.keys_values(inputs, cos=cos, sin=sin)
        keys, values = cache.write(0, keys=keys, values=values)
        queries = self.attention.queries(inputs, cos=cos, sin=sin)
        return self.finish(residual, self.attention.attend(queries, keys, values, mask=visible))


class BlockDraft(DraftNetwork):
    """A draft that says several positions in one pass: the block is the last token, then marks, all seeing each other.

    What a block sees of the text before it are keys and values made of the target's features alone, so they stay as
    they are once made.  Decoding (over a cache) and training (over a batch) run the same two parts.
    block_size: tokens of a block, its first one included; slot k (1 to block_size - 1) says the token k places behind
    it.  mask_token_id: the token that stands for a mark.
    """

    block_size: int
    mask_token_id: int

    @abstractmethod
    def context(self, features: Tensor, *, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of fused features [B, n, Hd] at positions [B, n]: two [B, A_kv, n, C]."""

    @abstractmethod
    def block(self, embeds: Tensor, *, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [B, n, Hd] of whole blocks; those of slot k say the token k places behind the first.

        embeds: [B, n, H] with n = block_size.  positions: [B, n] int64.  attend: lets each layer's queries see the
        context before the block, and all of the block.
        """


@runtime_checkable
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
    has_weights: whether there is anything to train and to save.
    """

    config: type[DraftConfig]
    configure: Callable[[TargetFacts, dict[str, object]], DraftConfig]
    build: Callable[[DraftConfig, DraftVocab | None], DraftNetwork | LookupDraft]
    has_weights: bool = True
