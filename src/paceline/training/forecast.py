"""What a recipe will need, from shapes alone: parameters, tokens, memory, arithmetic, disk; nothing is loaded or run.

Draft and target stand on the meta device.  Arithmetic counts products with weights (2 operations a weight and token
forward, 6 with the backward pass); attention over the context is left out, which for contexts of 2048 tokens is a few
per cent of these models.  It knows no clock and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import Recipe
from paceline.drafts._base import DraftNetwork, DraftPlugin
from paceline.errors import ConfigError
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetFacts
from paceline.store.architecture import Architecture
from paceline.targets._facts import facts_of
from paceline.training.optimizers import shared_out
from paceline.training.prepare import draft_config, objective_options

FORWARD, BOTH = 2, 6  # operations of a weight and token: forward, and forward with backward
MASTER, GRADIENT, MOMENT = 4, 4, 4  # bytes of a float32 weight, its gradient and a moment of the optimiser
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Forecast:
    """Counts and bytes.

    shapes: of the draft's weights by name.  passes: unrolled draft passes over a batch, as the objective's option
    `steps` says (1 where it has none).  steps: optimiser steps, None where the recipe counts in epochs.
    tokens_per_step: of one process, at most: padding counts.  memory: bytes of one process by what they hold.
    stored_per_token: bytes of a token's captured states in bfloat16.
    """

    draft_parameters: int
    shapes: dict[str, tuple[int, ...]]
    taps: tuple[int, ...]
    target_parameters: int
    target_source: str
    passes: int
    steps: int | None
    tokens_per_step: int
    operations_per_token: int
    memory: dict[str, int]
    stored_per_token: int

    @property
    def tokens(self) -> int | None:
        """Of one process in the whole run, at most."""
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def operations(self) -> float | None:
        """Of one process in the whole run."""
        return None if self.tokens is None else float(self.tokens) * self.operations_per_token

    def seconds(self, *, per_second: float, share: float) -> float | None:
        """Of the whole run on one device.  per_second: its operations at best.  share: of it that a run reaches."""
        return None if self.operations is None else self.operations / (per_second * share)


def forecast(recipe: Recipe, architecture: Architecture) -> Forecast:
    """What a recipe will need.  Raises ConfigError for a draft or an objective that does not fit."""
    facts = facts_of(architecture.model)
    draft = meta_draft(recipe, facts)
    draft.borrow(_Lender(architecture.model.get_output_embeddings().weight))
    training, passes = recipe.training, _passes(recipe)
    is_online = recipe.data.features is None
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    operations = BOTH * parameters * passes + (FORWARD * architecture.num_multiplied if is_online else 0)
    states = (len(draft.taps) + 1) * facts.hidden_size
    return Forecast(
        draft_parameters=parameters,
        shapes={name: tuple(parameter.shape) for name, parameter in draft.named_parameters()},
        taps=draft.taps,
        target_parameters=architecture.num_parameters,
        target_source=architecture.source,
        passes=passes,
        steps=training.steps,
        tokens_per_step=training.tokens_per_batch * training.accumulation,
        operations_per_token=operations,
        memory=_memory(recipe, draft, facts, architecture, parameters=parameters, passes=passes),
        stored_per_token=states * DTYPE_BYTES["bfloat16"],
    )


def meta_draft(recipe: Recipe, facts: TargetFacts) -> DraftNetwork:
    """The recipe's draft for a target with these facts, on the meta device.  Raises ConfigError."""
    plugin, config = draft_config(recipe, facts)
    size = recipe.draft.vocab_size or facts.vocab_size
    if size > facts.vocab_size:
        raise ConfigError(f"draft.vocab_size is {size}; expected at most the target's {facts.vocab_size}")
    vocab = DraftVocab.from_counts(torch.zeros(facts.vocab_size), size=size)  # which words does not change a shape
    return _built(plugin, config, vocab)


def _built(plugin: DraftPlugin, config: object, vocab: DraftVocab) -> DraftNetwork:
    with torch.device("meta"):
        draft = plugin.build(config, vocab)  # pyright: ignore[reportArgumentType]  the plug-in's own configuration
    assert isinstance(draft, DraftNetwork), "draft_config refuses drafts without weights"
    return draft.to("meta")


def _passes(recipe: Recipe) -> int:
    steps = objective_options(recipe).model_dump().get("steps")
    return steps if isinstance(steps, int) else 1


def _memory(
    recipe: Recipe, draft: DraftNetwork, facts: TargetFacts, architecture: Architecture, *, parameters: int, passes: int
) -> dict[str, int]:
    """Bytes of one process; the activations are an estimate: what the layer and the laws keep for the backward pass."""
    tokens, number = recipe.training.tokens_per_batch, 2 if recipe.training.precision == "bf16" else 4
    width, inner = facts.hidden_size, facts.intermediate_size
    words = draft.vocab.size
    per_pass = (20 * width + 6 * inner) * number + (2 * number + 4) * words  # layer; logits, their gradient, law
    states = (len(draft.taps) + 1) * width * number
    running = (10 * width + 3 * inner) * DTYPE_BYTES[recipe.target.dtype]
    return {
        "target weights": architecture.num_parameters * DTYPE_BYTES[recipe.target.dtype],
        "draft weights, float32": parameters * MASTER,
        "gradients": parameters * GRADIENT,
        "optimiser": _moments(recipe, draft) * MOMENT,
        "draft activations, about": tokens * per_pass * passes,
        "target's states and activations, about": tokens * (states + running),
    }


def _moments(recipe: Recipe, draft: DraftNetwork) -> int:
    """Numbers that the optimisers keep: two for each weight by AdamW, one by Muon."""
    by_muon, by_adamw = (sum(weight.numel() for weight in part) for part in shared_out(draft, recipe.training))
    return by_muon + 2 * by_adamw


@dataclass(frozen=True, slots=True)
class _Lender:
    """The target's head, for drafts that have none of their own."""

    head_weight: Tensor
    head_scale: tuple[float, float | None] = (1.0, None)
    head_bias: Tensor | None = None
