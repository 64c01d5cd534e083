"""DFlash: a few layers that say a whole block in one pass, reading the text before it from the target's features.

Tensor names and shapes are those of the published checkpoints, so that their weights load (DFlash, arXiv 2602.06036;
parts of Qwen3).
The context is hidden_norm(fc(taps)), the same for every layer; each layer projects it with the weights that project the
block.  Embedding and head are the target's, lent by `borrow`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn

from paceline.drafts._base import Attend, BlockDraft, DraftConfig, DraftPlugin, Lender
from paceline.drafts._borrowed import BorrowedHead
from paceline.drafts._layers import Attention, GatedMLP, RMSNorm
from paceline.drafts._sizes import (
    FC_NOISE,
    LayerConfig,
    distinct,
    draw_weights,
    hold_vocab,
    refuse_changed,
    refuse_taps,
    sizes_of,
)
from paceline.errors import ConfigError
from paceline.ops.rotary import apply_rotary, rotary_tables
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts

LAYERS = 5  # as published, for targets of 30 layers and more
BLOCK = 8  # half the published 16: a pass that says what a chain of seven says


class DFlashConfig(LayerConfig):
    """Sizes of a DFlash draft.

    block_size: tokens of a block, the last known one included.  mask_token_id: the token that stands for what is to be
    said.  taps: 0-based target layers whose outputs are read, low to high, each as wide as the draft.
    """

    block_size: int = Field(ge=2)
    mask_token_id: int = Field(ge=0)
    num_hidden_layers: int = Field(ge=1)
    taps: tuple[int, ...] = Field(min_length=1)

    @field_validator("mask_token_id")
    @classmethod
    def _is_known(cls, mask: int, info: ValidationInfo) -> int:
        size = info.data.get("vocab_size", mask + 1)
        if mask >= size:
            raise ValueError(f"an id below {size}, the target vocabulary")
        return mask

    @field_validator("taps")
    @classmethod
    def _distinct(cls, taps: tuple[int, ...]) -> tuple[int, ...]:
        return distinct(taps)


class NormedAttention(Attention):
    """Attention whose queries and keys are normed for each head before they are rotated, as in Qwen3."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(
            config.hidden_size,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
        )
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def queries(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed and rotated queries: x [B, n, width], cos/sin [B, n, C] -> [B, A, n, C]."""
        return apply_rotary(self.q_norm(self._split(self.q_proj(x), self.heads)), cos=cos, sin=sin)

    def keys_values(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normed and rotated keys, and values: -> two [B, A_kv, n, C]."""
        keys = apply_rotary(self.k_norm(self._split(self.k_proj(x), self.kv_heads)), cos=cos, sin=sin)
        return keys, self._split(self.v_proj(x), self.kv_heads)


class DFlashLayer(nn.Module):
    """One layer; parameter names as published (`layers.{i}.*`)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = NormedAttention(config)
        self.mlp = GatedMLP(width, inner=config.intermediate_size)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)


class DFlash(BorrowedHead, BlockDraft):
    """The DFlash network; the map of a reduced vocabulary (`d2t` offsets, `t2d` membership) is inside its weights."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DFlashConfig, vocab: DraftVocab) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.taps = config.taps
        self.target_width = width
        self.max_positions = config.max_position_embeddings
        self.rotary = config.rotary()
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        hold_vocab(self, vocab, config=config)
        self.expect_head()

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary, read from the weights."""
        return DraftVocab(d2t=self.d2t, t2d=self.t2d)

    @torch.no_grad()
    def initialise(self, head: Tensor, *, tap_sizes: Sequence[float]) -> None:
        """fc starts as "pass the highest tap" and a little noise, and reads every tap at its usual size.

        The published start is chance alone; a target's taps may differ a hundredfold in size, and hidden_norm behind
        fc would let the largest speak alone.  The head is the target's as it is.
        """
        width = self.config.hidden_size
        self.fc.weight.mul_(FC_NOISE)
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        for columns, size in zip(self.fc.weight.split(width, dim=1), tap_sizes, strict=True):
            columns /= size

    def borrow(self, target: Lender) -> None:
        """See BorrowedHead.  Raises ConfigError for a target without the mask token's row, too."""
        rows = len(target.head_weight)
        if self.mask_token_id >= rows:
            raise ConfigError(
                f"the draft's mask token is {self.mask_token_id}; the target has ids 0 to {rows - 1}: choose the "
                "draft's own target"
            )
        super().borrow(target)

    def fuse(self, taps: Tensor) -> Tensor:
        """Target features [..., K*H] -> the context of every layer [..., Hd]."""
        return self.hidden_norm(self.fc(taps))

    def context(self, features: Tensor, *, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of the context: [B, n, Hd] at [B, n] -> two [B, A_kv, n, C]."""
        cos, sin = rotary_tables(self.rotary, positions=positions)
        return [layer.self_attn.keys_values(features, cos=cos, sin=sin) for layer in self._layers()]

    def block(self, embeds: Tensor, *, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the final norm: embeds [B, n, H] at positions [B, n] -> [B, n, Hd]."""
        cos, sin = rotary_tables(self.rotary, positions=positions)
        hidden = embeds
        for index, layer in enumerate(self._layers()):
            normed = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.keys_values(normed, cos=cos, sin=sin)
            mixed = attend(index, layer.self_attn.queries(normed, cos=cos, sin=sin), keys, values)
            hidden = hidden + layer.self_attn.project(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden

    def head_input(self, hidden: Tensor) -> Tensor:
        """The final norm: [..., Hd] -> [..., Hd]."""
        return self.norm(hidden)

    def _layers(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]


def default_taps(num_layers: int, *, count: int) -> tuple[int, ...]:
    """`count` layers from 1 to L - 3, evenly, as published (one: L // 2); of a shallower target from first to last."""
    if count == 1:
        return (num_layers // 2,)
    low, high = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 1)
    return tuple(sorted({round(low + i * (high - low) / (count - 1)) for i in range(count)}))


def configure(facts: TargetFacts, options: dict[str, object]) -> DFlashConfig:
    """The target's sizes, changed by the recipe's options (any field of DFlashConfig)."""
    found = options.get("num_hidden_layers", min(LAYERS, max(1, facts.num_layers // 6)))
    layers = found if isinstance(found, int) and found > 0 else 1  # anything else is refused below, by its key
    own: dict[str, object] = {
        "block_size": BLOCK,
        "num_hidden_layers": layers,
        "draft_vocab_size": min(32000, facts.vocab_size),
        "taps": default_taps(facts.num_layers, count=layers),
    }
    if facts.unsaid_ids:
        own["mask_token_id"] = facts.unsaid_ids[0]
    elif "mask_token_id" not in options:
        raise ConfigError(
            "dflash needs a token that stands for what is to be said, and the target has none to spare: no mask token, "
            "no embedding row without a token, no unused special token; set draft.options.mask_token_id to an id that "
            "no answer holds"
        )
    config = sizes_of(DFlashConfig, facts, name="dflash", own=own, options=options)
    fixed = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    refuse_changed(config, name="dflash", fixed=fixed)
    refuse_taps(config.taps, facts)
    return config


def build(config: DraftConfig, vocab: DraftVocab | None) -> DFlash:
    """A draft with fresh weights: normal(0, 0.02) projections, unit norms, as the published training starts."""
    assert isinstance(config, DFlashConfig)
    assert vocab is not None
    draft = DFlash(config, vocab)
    draw_weights(draft)
    return draft


PLUGIN = DraftPlugin(config=DFlashConfig, configure=configure, build=build)
