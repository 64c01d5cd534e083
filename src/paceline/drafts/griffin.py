"""GRIFFIN: token-guided fusion, and a layer that returns what it says beside what it hands on.

Tensor names and shapes are those of the published checkpoints (Hu et al., GRIFFIN, arXiv 2502.11018).  The first half
of a hidden state ("predict") goes to the target's head, the second ("regress") to the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafts._base import DraftConfig, DraftPlugin
from paceline.drafts._feature import FeatureConfig, FeatureDraft, configure_feature
from paceline.drafts._layers import RMSNorm
from paceline.drafts._sizes import draw_weights
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts


class GriffinConfig(FeatureConfig):
    """Sizes of a GRIFFIN draft; its fusion has the layer's intermediate size, as published."""


class TokenMLP(nn.Module):
    """down(silu(up([norm(state); norm(embedding)]))): one norm for both, no gate."""

    def __init__(self, config: GriffinConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(width, eps=config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor, embeds: Tensor) -> Tensor:
        """[..., H] twice -> [..., H]."""
        both = torch.cat([self.input_layernorm(states), self.input_layernorm(embeds)], dim=-1)
        return self.down_proj(F.silu(self.up_proj(both)))


class Fusion(nn.Module):
    """x = fc([embedding; feature]), then x + MLP(norm(x), embedding): the token is heard a second time."""

    def __init__(self, config: GriffinConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.mlp = TokenMLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeds: Tensor, features: Tensor) -> Tensor:
        """[..., H] twice -> [..., H]."""
        fused = self.fc(torch.cat([embeds, features], dim=-1))
        return fused + self.mlp(self.post_attention_layernorm(fused), embeds)


class Griffin(FeatureDraft):
    """The GRIFFIN network; a hidden state is [predict ; regress], 2 H wide."""

    def __init__(self, config: GriffinConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab, out=2 * config.hidden_size)
        self.fc = Fusion(config)

    @torch.no_grad()
    def initialise(self, head: Tensor, *, tap_sizes: Sequence[float]) -> None:
        """fc passes the feature on; see FeatureDraft.start_from."""
        self.start_from(self.fc.fc, size=tap_sizes[0])
        self.fc.mlp.down_proj.weight *= tap_sizes[0]

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Token and feature fused, for attention and as the residual."""
        fused = self.fc(embeds, features)
        return fused, fused

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """[predict ; regress]: one state twice, and what the MLP adds to each half."""
        hidden = residual + mixed
        both = torch.cat([hidden, hidden], dim=-1)
        return both + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    def head_input(self, hidden: Tensor) -> Tensor:
        """predict: [..., 2 H] -> [..., H]."""
        return hidden[..., : self.target_width]

    def onward(self, hidden: Tensor) -> Tensor:
        """regress: [..., 2 H] -> [..., H]."""
        return hidden[..., self.target_width :]


def configure(facts: TargetFacts, options: dict[str, object]) -> GriffinConfig:
    """The target's sizes, changed by the recipe's options (any field of GriffinConfig)."""
    return configure_feature(GriffinConfig, facts, options, name="griffin")


def build(config: DraftConfig, vocab: DraftVocab | None) -> Griffin:
    """A draft with fresh weights."""
    assert isinstance(config, GriffinConfig)
    assert vocab is not None
    draft = Griffin(config, vocab)
    draw_weights(draft)
    return draft


PLUGIN = DraftPlugin(config=GriffinConfig, configure=configure, build=build)
