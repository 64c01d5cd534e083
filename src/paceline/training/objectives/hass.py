"""HASS: EAGLE's losses with top-K distillation, over passes in which the draft is fed its own features.

Harmonized objective distillation (K = 10) and harmonized context alignment (3 passes of equal weight), Zhang et al.,
arXiv 2408.15766.  What differs from the published code, and why, stands in `_passes`.
"""

from __future__ import annotations

from paceline.drafts._base import DraftNetwork
from paceline.records import LossTerms
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.objectives._passes import Passes, PassesConfig, feature_draft


class HassConfig(PassesConfig):
    """HASS's own weights: 1.0 regression, 0.1 cross-entropy, 1.0 distillation of the target's 10 likeliest tokens."""


class Hass:
    """The objective; see the module's docstring."""

    def __init__(self, config: HassConfig) -> None:
        self._passes = Passes(config)

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """See Passes.loss."""
        return self._passes.loss(feature_draft(draft, name="hass"), batch, target)


def build(config: ObjectiveConfig, draft: object) -> Hass:
    """The objective for a draft that guesses features; others are refused."""
    assert isinstance(config, HassConfig)
    feature_draft(draft, name="hass")
    return Hass(config)


PLUGIN = ObjectivePlugin(config=HassConfig, build=build)
