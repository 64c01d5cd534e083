"""Drafts that guess the target's next last hidden state and speak through the target's own head (EAGLE-1's idea).

What they share is here: the tap, the borrowed head, the vocabulary map and one Llama layer without an input norm.  How
token and feature are fused, and what becomes of the layer's output, is each draft's own.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.drafts._base import SequentialDraft
from paceline.drafts._borrowed import BorrowedHead
from paceline.drafts._layers import Attention, GatedMLP, RMSNorm
from paceline.drafts._sizes import FC_NOISE, LayerConfig, hold_vocab, refuse_changed, sizes_of
from paceline.ops.rotary import rotary_tables
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts


class FeatureConfig(LayerConfig):
    """Sizes of a draft in the target's feature space.

    target_num_layers: of the target whose last hidden state is read.
    """

    target_num_layers: int = Field(ge=1)


Config = TypeVar("Config", bound=FeatureConfig)


def configure_feature(kind: type[Config], facts: TargetFacts, options: dict[str, object], *, name: str) -> Config:
    """The target's sizes, changed by a recipe's options.  Raises ConfigError naming the option at fault."""
    own: dict[str, object] = {"target_num_layers": facts.num_layers}
    config = sizes_of(kind, facts, name=name, own=own, options=options)
    fixed = {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "target_num_layers": facts.num_layers,
    }
    refuse_changed(config, name=name, fixed=fixed)
    return config


class FeatureLayer(nn.Module):
    """A Llama layer whose input is not normed (EAGLE omits the norm of its first layer); names as published.

    out: width of what the MLP returns.
    """

    def __init__(self, config: FeatureConfig, *, out: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = Attention(
            width,
            width=width,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(width, inner=config.intermediate_size, out=out)


class FeatureDraft(BorrowedHead, SequentialDraft):
    """A sequential draft in the target's own feature space (Hd = H), with the target's head and a vocabulary map.

    `onward` is its estimate of the target's last hidden state at the position it was just fed, which objectives may
    regress.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: FeatureConfig, vocab: DraftVocab, *, out: int) -> None:
        super().__init__()
        self.config = config
        self.taps = (config.target_num_layers,)
        self.target_width = config.hidden_size
        self.max_positions = config.max_position_embeddings
        self.rotary = config.rotary()
        self.layers = nn.ModuleList([FeatureLayer(config, out=out)])
        hold_vocab(self, vocab, config=config)
        self.expect_head()

    @property
    def layer(self) -> FeatureLayer:
        """The one layer."""
        (layer,) = self.layers
        assert isinstance(layer, FeatureLayer)
        return layer

    @property
    def attention(self) -> Attention:  # type: ignore[override]
        """The projections of the one layer."""
        return self.layer.self_attn

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary, read from the weights."""
        return DraftVocab(d2t=self.d2t, t2d=self.t2d)

    def misfit(self, *, num_layers: int, width: int) -> str:
        """See DraftNetwork; a deeper target's layer of that number is not its last state, so depths must agree."""
        if (num_layers, width) == (self.taps[0], self.target_width):
            return ""
        return (
            f"it reads the last hidden state of {self.taps[0]} layers of width {self.target_width}; the target has "
            f"{num_layers} of width {width}"
        )

    @torch.no_grad()
    def start_from(self, fc: nn.Linear, *, size: float) -> None:
        """Begin with "the next feature is like this one" and a little noise, whatever the size of the target's states.

        fc: on [embedding; feature].  size: root mean square of a usual token's features.  The layer then starts as one
        on features of size 1 would: its attention reads them without a norm, and what its MLP adds is normed.
        """
        width = self.config.hidden_size
        fc.weight[:, width:] *= FC_NOISE
        fc.weight[:, width:] += torch.eye(width, device=fc.weight.device, dtype=fc.weight.dtype)
        for projection in (self.attention.q_proj, self.attention.k_proj):
            projection.weight /= size
        self.layer.mlp.down_proj.weight *= size

    def fuse(self, taps: Tensor) -> Tensor:
        """The feature as it is: [..., H] -> [..., H]."""
        return taps

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines for positions [B, n] -> two [B, n, C]."""
        return rotary_tables(self.rotary, positions=positions)
