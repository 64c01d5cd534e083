"""EAGLE-3: one decoder layer on [norm(embedding); norm(feature)], fed its own output before the final norm.

Tensor names and shapes are those of the published checkpoints, so that their weights load (Li et al., "EAGLE-3",
arXiv 2503.01840).  The residual is the feature before its norm; the token embedding is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from paceline.drafts._base import DraftConfig, DraftPlugin, SequentialDraft
from paceline.drafts._layers import Attention, GatedMLP, LayerParts, RMSNorm
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
from paceline.ops.rotary import rotary_tables
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts

FEATURE_SIZE = 0.1  # root mean square of the first features, of the order of what a fresh layer adds to them


class Eagle3Config(LayerConfig):
    """Sizes of an EAGLE-3 draft.

    draft_vocab_size: rows of lm_head.  target_hidden_size: width of one tap.
    taps: 0-based target layers whose outputs are read, low to high.
    """

    target_hidden_size: int = Field(ge=1)
    taps: tuple[int, ...] = Field(min_length=1)

    @field_validator("taps")
    @classmethod
    def _distinct(cls, taps: tuple[int, ...]) -> tuple[int, ...]:
        return distinct(taps)


class Eagle3Layer(nn.Module):
    """The one layer; parameter names as published (`midlayer.*`)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.self_attn = Attention(
            2 * width,
            width=width,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
        )
        self.mlp = GatedMLP(width, inner=config.intermediate_size)

    def attention_input(self, embeds: Tensor, features: Tensor) -> Tensor:
        """[B, n, Hd] twice -> [B, n, 2 Hd], normed and in the published order."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(features)], dim=-1)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Residual and MLP: residual [B, n, Hd], mixed = attention output -> [B, n, Hd]."""
        hidden = residual + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(SequentialDraft):
    """The EAGLE-3 network with its draft vocabulary map (`d2t` offsets, `t2d` membership) inside the weights."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, vocab: DraftVocab) -> None:
        super().__init__()
        self.config = config
        self.taps = config.taps
        self.target_width = config.target_hidden_size
        self.max_positions = config.max_position_embeddings
        self.rotary = config.rotary()
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        hold_vocab(self, vocab, config=config)

    @property
    def attention(self) -> Attention:  # type: ignore[override]
        """The projections of the one layer."""
        return self.midlayer.self_attn

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary, read from the weights."""
        return DraftVocab(d2t=self.d2t, t2d=self.t2d)

    @torch.no_grad()
    def initialise(self, head: Tensor, *, tap_sizes: Sequence[float]) -> None:
        """lm_head starts as the target's rows of the draft's words, fc as "pass the highest tap" and a little noise.

        fc's columns are divided by the size of what they read: features then begin with a root mean square of about
        FEATURE_SIZE, and what the layer adds is heard beside them; a target's own may be a hundred times as large.
        Another point of the same network than the published random start, and a better one (docs/log.md).  The gain of
        the target's last norm is left out: it makes the first laws far too sharp.
        """
        self.lm_head.weight.copy_(head[self.vocab.ids.to(head.device)])
        width = self.config.target_hidden_size
        if width == self.config.hidden_size:
            self.fc.weight.mul_(FC_NOISE)
            self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        for columns, size in zip(self.fc.weight.split(width, dim=1), tap_sizes, strict=True):
            columns *= FEATURE_SIZE / size

    def fuse(self, taps: Tensor) -> Tensor:
        """Target features [..., K*H] -> [..., Hd]."""
        return self.fc(taps)

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """[norm(embedding); norm(feature)] for attention, and the feature before its norm as the residual."""
        return self.midlayer.attention_input(embeds, features), features

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines for positions [B, n] -> two [B, n, C]."""
        return rotary_tables(self.rotary, positions=positions)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The result goes to the next step before the final norm."""
        return self.midlayer.finish(residual, mixed)

    def head_input(self, hidden: Tensor) -> Tensor:
        """The final norm: [..., Hd] -> [..., Hd]."""
        return self.norm(hidden)

    @property
    def head_weight(self) -> Tensor:
        """[W, Hd]."""
        return self.lm_head.weight

    def layer_parts(self) -> LayerParts | None:
        """A Llama layer on [norm(embedding); norm(feature)]; a subclass may have changed it."""
        if type(self) is not Eagle3:
            return None
        layer = self.midlayer
        return LayerParts(
            layer.input_layernorm, layer.hidden_norm, layer.self_attn, layer.post_attention_layernorm, layer.mlp,
            self.norm, self.lm_head,
        )  # fmt: skip


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Outputs of layers 1, L//2 - 1 and L - 4, as published; a shallower target's first, middle and last, each once."""
    if num_layers >= 6:
        return (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(sorted({round(i * (num_layers - 1) / 2) for i in range(3)}))


def configure(facts: TargetFacts, options: dict[str, object]) -> Eagle3Config:
    """The target's sizes, changed by the recipe's options (any field of Eagle3Config)."""
    own: dict[str, object] = {
        "draft_vocab_size": min(32000, facts.vocab_size),
        "target_hidden_size": facts.hidden_size,
        "taps": default_taps(facts.num_layers),
    }
    config = sizes_of(Eagle3Config, facts, name="eagle3", own=own, options=options)
    fixed = {
        "hidden_size": facts.hidden_size,
        "target_hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
    }
    refuse_changed(config, name="eagle3", fixed=fixed)
    refuse_taps(config.taps, facts)
    return config


def build(config: DraftConfig, vocab: DraftVocab | None) -> Eagle3:
    """A draft with fresh weights: normal(0, 0.02) projections, unit norms."""
    assert isinstance(config, Eagle3Config)
    assert vocab is not None
    draft = Eagle3(config, vocab)
    draw_weights(draft)
    return draft


PLUGIN = DraftPlugin(config=Eagle3Config, configure=configure, build=build)
