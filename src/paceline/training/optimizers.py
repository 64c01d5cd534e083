"""Which optimiser updates which weights, and what of it must be saved to resume a run bit for bit.

AdamW for everything, or Muon (Jordan et al. 2024; torch.optim.Muon) for the layer's matrices and AdamW for the head,
gains and biases.  It knows no schedule: every group carries its peak rate, and the trainer scales them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from paceline.config import TrainingSection
from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError

RESERVED = ("draft", "rng", "objective")  # names of other parts of a saved state


class Optimizers:
    """The optimisers of a run as one.  Raises ConfigError when torch has no Muon (before 2.9)."""

    def __init__(self, draft: DraftNetwork, training: TrainingSection) -> None:
        self._named = [(name, weight) for name, weight in draft.named_parameters() if weight.requires_grad]
        inner, others = shared_out(draft, training)
        self._parts: list[Optimizer] = [_adamw(others, training)]
        if inner:
            self._parts.append(_muon(inner, training))

    def step(self, *, share: float) -> None:
        """One update of every weight with a gradient.  share: of each group's peak rate, from the schedule."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak"] * share
            part.step()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """("moment.name of the weight", value) of everything the optimisers remember."""
        for name, weight in self._named:
            for part in self._parts:
                for moment, value in part.state.get(weight, {}).items():
                    assert isinstance(value, Tensor) and moment not in RESERVED, moment
                    yield f"{moment}.{name}", value

    def load(self, moments: dict[str, dict[str, Tensor]]) -> None:
        """moments: kind -> name of the weight -> value, as `state` gave them."""
        for part in self._parts:
            members = {id(weight) for group in part.param_groups for weight in group["params"]}
            for name, weight in self._named:
                if id(weight) not in members:
                    continue
                found = {kind: values[name] for kind, values in moments.items() if name in values}
                if found:  # copied, because the file is mapped, not read
                    part.state[weight] = {kind: value.to(weight.device, copy=True) for kind, value in found.items()}


def shared_out(draft: DraftNetwork, training: TrainingSection) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights that Muon updates, and those that AdamW does."""
    trained = [weight for weight in draft.parameters() if weight.requires_grad]
    if training.optimizer != "muon":
        return [], trained
    head = draft.head_weight
    inner = [weight for weight in trained if weight.dim() == 2 and weight is not head]
    return inner, [weight for weight in trained if weight.dim() != 2 or weight is head]


def _adamw(weights: list[nn.Parameter], training: TrainingSection) -> Optimizer:
    """Matrices decay, gains and biases do not."""
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay, "peak": training.learning_rate}
        for members, decay in ((matrices, training.weight_decay), (vectors, 0.0))
        if members
    ]
    return AdamW(groups, lr=0.0, betas=training.betas, fused=True)


def _muon(weights: list[nn.Parameter], training: TrainingSection) -> Optimizer:
    """An update has the same root mean square for every shape (Liu et al., arXiv 2502.16982)."""
    try:
        from torch.optim import Muon
    except ImportError:
        raise ConfigError(
            f"training.optimizer = muon needs torch 2.9 or later, found {torch.__version__}; use adamw"
        ) from None
    group = {"params": weights, "weight_decay": training.weight_decay, "peak": training.muon_learning_rate}
    return Muon([group], lr=0.0, weight_decay=training.weight_decay, adjust_lr_fn="match_rms_adamw")
