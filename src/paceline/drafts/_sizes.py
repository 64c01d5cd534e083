"""What drafts with one Llama layer share: sizes, what of them the target fixes, the vocabulary map, first weights.

It knows no network: which tensors have these sizes is each draft's own.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import nn

from paceline.config import parse_section
from paceline.drafts._base import DraftConfig
from paceline.errors import ConfigError
from paceline.ops.rotary import SETTINGS, RotarySpec
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts

FC_NOISE = 0.2  # share of the random start that fc keeps beside the pass-through


class LayerConfig(DraftConfig):
    """Sizes of a Llama layer and of what it says.

    vocab_size: the target's.  draft_vocab_size: words that the draft can say.  rope: rotary settings, target's key
    layout.  attention_bias: of queries, keys and values (the Qwen family).
    """

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rms_norm_eps: float = Field(gt=0)
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    rope: dict[str, object]
    attention_bias: bool = False

    @field_validator("num_key_value_heads")
    @classmethod
    def _groups(cls, count: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_attention_heads", count)
        if heads % count:
            raise ValueError(f"a number that divides the {heads} heads")
        return count

    @field_validator("rope")
    @classmethod
    def _geometry(cls, rope: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        unknown = sorted(set(rope) - set(SETTINGS))
        if unknown:
            raise ValueError(f"rotary settings without {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
        if "head_dim" in info.data and "max_position_embeddings" in info.data:
            try:
                _rotary(rope, head_dim=info.data["head_dim"], most=info.data["max_position_embeddings"])
            except ConfigError as error:
                raise ValueError(f"one rotary geometry: {error}") from None
        return rope

    def rotary(self) -> RotarySpec:
        """The rotary geometry that `rope` describes."""
        return _rotary(self.rope, head_dim=self.head_dim, most=self.max_position_embeddings)


def _rotary(rope: dict[str, object], *, head_dim: int, most: int) -> RotarySpec:
    return RotarySpec.from_settings(rope, head_dim=head_dim, max_positions=most)


Config = TypeVar("Config", bound=LayerConfig)


def sizes_of(
    kind: type[Config], facts: TargetFacts, *, name: str, own: dict[str, object], options: dict[str, object]
) -> Config:
    """The target's sizes and the draft's own fields, changed by a recipe's options.

    name: of the draft, for errors.  Raises ConfigError naming the option at fault.
    """
    fields: dict[str, object] = {
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "rms_norm_eps": facts.rms_norm_eps,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_positions,
        "rope": facts.rope,
    }
    return parse_section(kind, table={**fields, **own, **options}, source=name, prefix=("draft", "options"))


def refuse_changed(config: LayerConfig, *, name: str, fixed: dict[str, int]) -> None:
    """Raises ConfigError where an option has changed what only the target can say.  fixed: field -> the target's."""
    for field, expected in fixed.items():
        found = config.model_dump()[field]
        if found != expected:
            raise ConfigError(
                f"draft.options.{field} is {found}; {name} works on the target's embedding and states, so it must be "
                f"the target's {expected}: leave it out"
            )


def distinct(taps: tuple[int, ...]) -> tuple[int, ...]:
    """The taps, for a validator.  Raises ValueError where a layer is named twice."""
    if len(set(taps)) < len(taps):
        raise ValueError("every layer once")
    return taps


def refuse_taps(taps: tuple[int, ...], facts: TargetFacts) -> None:
    """Raises ConfigError naming taps that are no decoder layers of the target."""
    bad = [tap for tap in taps if not 0 <= tap < facts.num_layers]
    if bad:
        raise ConfigError(
            f"draft.options.taps: {bad} are not decoder layers of the target (0 to {facts.num_layers - 1})"
        )


def hold_vocab(draft: nn.Module, vocab: DraftVocab, *, config: LayerConfig) -> None:
    """Put a draft's vocabulary map among its weights, as buffers `d2t` (offsets) and `t2d` (membership).

    Raises ConfigError where it is not of the configuration's size.
    """
    if vocab.size != config.draft_vocab_size or vocab.target_size != config.vocab_size:
        raise ConfigError(
            f"draft vocabulary of {vocab.size} of {vocab.target_size} words, configuration says "
            f"{config.draft_vocab_size} of {config.vocab_size}"
        )
    # A full vocabulary needs no map in the file.
    draft.register_buffer("d2t", vocab.d2t.clone(), persistent=not vocab.is_full)
    draft.register_buffer("t2d", vocab.t2d.clone(), persistent=not vocab.is_full)


@torch.no_grad()
def draw_weights(draft: nn.Module) -> None:
    """normal(0, 0.02) projections, zero biases, unit norms: as the published trainings start."""
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                nn.init.zeros_(module.bias)
