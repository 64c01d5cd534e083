"""The EAGLE-1/2 network: one layer on fc([embedding; feature]) that guesses the target's next last hidden state.

Tensor names and shapes are those of the published checkpoints (Li et al., EAGLE, arXiv 2401.15077; EAGLE-2 has the same
weights, arXiv 2406.16858).  A reduced vocabulary is ours; the published case is the full one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.drafts._base import DraftConfig, DraftPlugin
from paceline.drafts._feature import FeatureConfig, FeatureDraft, configure_feature
from paceline.drafts._sizes import draw_weights
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts


class Eagle2Config(FeatureConfig):
    """Sizes of an EAGLE-1/2 draft.  bias: of `fc`; the published drafts of Llama-3 targets have none."""

    bias: bool = True


class Eagle2(FeatureDraft):
    """The EAGLE-1/2 network."""

    def __init__(self, config: Eagle2Config, vocab: DraftVocab) -> None:
        super().__init__(config, vocab, out=config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)

    def initialise(self, head: Tensor, *, tap_sizes: Sequence[float]) -> None:
        """fc passes the feature on; see FeatureDraft.start_from."""
        self.start_from(self.fc, size=tap_sizes[0])

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """fc([embedding; feature]), for attention and as the residual."""
        fused = self.fc(torch.cat([embeds, features], dim=-1))
        return fused, fused

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The guessed feature, without a final norm: the target's head reads it, and so does the next step."""
        hidden = residual + mixed
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    def head_input(self, hidden: Tensor) -> Tensor:
        """The guess itself."""
        return hidden


def configure(facts: TargetFacts, options: dict[str, object]) -> Eagle2Config:
    """The target's sizes, changed by the recipe's options (any field of Eagle2Config)."""
    return configure_feature(Eagle2Config, facts, options, name="eagle2")


def build(config: DraftConfig, vocab: DraftVocab | None) -> Eagle2:
    """A draft with fresh weights."""
    assert isinstance(config, Eagle2Config)
    assert vocab is not None
    draft = Eagle2(config, vocab)
    draw_weights(draft)
    return draft


PLUGIN = DraftPlugin(config=Eagle2Config, configure=configure, build=build)
