"""GRIFFIN's token-alignable training: a later pass trains only rows whose chain decoding could have kept so far.

As HASS, but row t takes part in pass n only if in every pass before, the true token was among the draft's k = 3
likeliest (Hu et al., arXiv 2502.11018).  In pass n - 1 row t predicts token t + n + 1, and pass n feeds it that token:
it is the one compared, in the row's own chain.  The published code looks one token too far at first: at what another
row's chain says of the token that pass n is going to predict.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.drafts._feature import FeatureDraft
from paceline.ops.fused_losses import among_best
from paceline.records import LossTerms
from paceline.training.collate import PREDICT
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.objectives._passes import Passes, PassesConfig, feature_draft
from paceline.training.unroll import UnrollStep


class GriffinConfig(PassesConfig):
    """GRIFFIN's weight of the distillation, and aligned: k, the draft's likeliest tokens that count as right."""

    distillation: float = Field(default=0.5, ge=0)
    aligned: int = Field(default=3, ge=1)


class Griffin:
    """The objective; see the module's docstring."""

    def __init__(self, config: GriffinConfig) -> None:
        self.config = config
        self._passes = Passes(config, narrow=self._aligned)

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """See Passes.loss; `trained_n` is the share of the supervised rows that pass n trains."""
        return self._passes.loss(feature_draft(draft, name="griffin"), batch, target)

    def _aligned(self, draft: FeatureDraft, batch: TrainingBatch, unrolled: UnrollStep, trained: Tensor) -> Tensor:
        """The trained rows whose true next token the draft has among its likeliest."""
        predicted = unrolled.rows.take(batch.ids, ahead=PREDICT + unrolled.step)[trained]
        kept = trained.clone()
        kept[trained] = among_best(
            draft.head_input(unrolled.hidden[trained]),
            weight=draft.head_weight,
            labels=draft.vocab.to_draft(predicted),
            count=self.config.aligned,
        )
        return kept


def build(config: ObjectiveConfig, draft: object) -> Griffin:
    """The objective for a draft that guesses features; others are refused."""
    assert isinstance(config, GriffinConfig)
    feature_draft(draft, name="griffin")
    return Griffin(config)


PLUGIN = ObjectivePlugin(config=GriffinConfig, build=build)
