"""Variational speculative decoding: train a draft for the paths that verification keeps (VSD, arXiv 2602.05774).

The formulas are those of docs/papers.md, "VSD".  E-step without a single target call: the batch's text is what the
target emitted, and speculative sampling can be drawn backwards from it.  Given the emitted token x ~ p, the proposal
was x with probability min(1, q(x) / p(x)), else a draw from (q - p)+; with a greedy oracle p is one at its choice.  So
the text is the corrective sample at the first rejection, and a path goes on as long as the text is the oracle's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError
from paceline.ops import path_rules
from paceline.ops.fused_losses import head_logits, head_rule
from paceline.records import LossTerms
from paceline.training.objectives._arw import RejectionWeight
from paceline.training.objectives._base import ObjectiveConfig, ObjectivePlugin, TargetView, TrainingBatch
from paceline.training.objectives._oracle import OracleStep, oracle_steps
from paceline.training.objectives._proposals import Fate, Weights, among_best, chances, counted, draw, expect
from paceline.training.paths import refuse_steps

NOTHING = 1e-12  # a share of refused mass below it has no mean


class VSDConfig(ObjectiveConfig):
    """Options; defaults are methods.md's where it names one.

    steps: l, the longest path.  temperature: of the law that verifies; 0 is the greedy oracle.
    estimator: `expected` takes the expectation over proposals exactly, `sampled` draws `proposals` (S) of them.
    utility: what an accepted path is worth (ops/paths.py).  reach: how a path stays alive: `law`, by being drawn;
    `tree`, by being among the `width` best.  floor: share of every path that is taken to survive a depth anyway (0 is
    VSD, 1 trains all depths alike).  arw: adaptive rejection weighting with an average over `memory` batches; without
    it c = `rejection`.  confidence: how much a corrected path's weight grows with the refused token's q.  car, gamma:
    weight of confidence-aware regularisation and its power of q.  beta: weight of the KL term; kl: `reverse` is the
    ELBO's KL(q || p), `forward` the soft cross-entropy of `ttt`; both to the target's own law (T = 1).
    """

    steps: int = Field(default=7, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    estimator: Literal["sampled", "expected"] = "expected"
    proposals: int = Field(default=8, ge=1)
    utility: Literal["none", "length", "remaining"] = "none"
    reach: Literal["law", "tree"] = "law"
    width: int = Field(default=3, ge=1)
    floor: float = Field(default=0.0, ge=0, le=1)
    arw: bool = True
    memory: float = Field(default=100.0, ge=1)
    rejection: float = Field(default=1.0, ge=0, le=1)
    confidence: float = Field(default=1.0, ge=0)
    car: float = Field(default=0.1, ge=0)
    gamma: float = Field(default=1.0, ge=0)
    beta: float = Field(default=0.0, ge=0)
    kl: Literal["reverse", "forward"] = "reverse"


class VSD:
    """The objective; see the module's docstring.  What ARW remembers is part of a run's state."""

    def __init__(self, config: VSDConfig) -> None:
        self.config = config
        self.rejection = RejectionWeight(memory=config.memory) if config.arw else None

    def state(self) -> Tensor:
        """[k] float64: what a resumed run needs to know of the batches before."""
        return torch.zeros(0, dtype=torch.float64) if self.rejection is None else self.rejection.state()

    def load(self, state: Tensor) -> None:
        """Put back what `state` returned."""
        if self.rejection is not None:
            self.rejection.load(state)

    def loss(self, draft: DraftNetwork, batch: TrainingBatch, target: TargetView, *, step: int) -> LossTerms:
        """Sum over rows and depths of weighted likelihood, CAR and KL terms; denominator: rows of depth 0."""
        config = self.config
        path = oracle_steps(draft, batch, target, steps=config.steps, temperature=config.temperature, seed=step)
        said = [head_logits(draft.head_input(one.hidden), weight=draft.head_weight) for one in path]
        fate, weights = self._propose(path, said, seed=_seed(batch, step))
        c = config.rejection if self.rejection is None else self.rejection.value
        numerator = batch.taps.new_zeros((), dtype=torch.float32)
        scores = numerator.new_zeros(2, len(path[0].active))
        for one, logits, weight in zip(path, said, weights, strict=True):
            rule = _Rule(one, weight, config, c, scores)
            head_input = draft.head_input(one.hidden)
            numerator = numerator + head_rule(head_input, weight=draft.head_weight, logits=logits, rule=rule)
        if self.rejection is not None:
            kept, tried = float(fate.kept.sum()), float(fate.alive.sum())  # sync
            self.rejection.learn(scores[:, path[0].goes_on], accepted=kept, tried=tried)
        return LossTerms(numerator, path[0].active.sum().float(), _metrics(path, said, fate, c=c))

    @torch.no_grad()
    def _propose(self, path: list[OracleStep], said: list[Tensor], *, seed: int) -> tuple[Fate, list[Weights]]:
        """The E-step."""
        config = self.config
        survive = chances(path, said) if config.reach == "law" else among_best(path, said, width=config.width)
        survive = config.floor + (1 - config.floor) * survive
        if config.estimator == "expected":
            return expect(path, survive, utility=config.utility)
        return draw(path, said, survive, count=config.proposals, utility=config.utility, seed=seed)


class _Rule:
    """The terms of one depth, for `head_rule`; adds what rows are accepted and rejected for to `scores` [2, n]."""

    def __init__(self, one: OracleStep, weight: Weights, config: VSDConfig, c: float, scores: Tensor) -> None:
        self.one, self.weight, self.config, self.c, self.scores = one, weight, config, c, scores

    def __call__(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        config, log_q = self.config, logits.log_softmax(dim=-1)
        q = log_q.exp()
        kept, corrected, refused = self._split(q, part)
        # The mean over refused tokens of 1 + confidence * q: a sure mistake is corrected harder.
        share = refused.sum(dim=-1, keepdim=True).clamp_min(NOTHING)
        corrected = corrected * (1 + config.confidence * (refused * q).sum(dim=-1, keepdim=True) / share)
        self._score(kept, corrected, log_q, part)
        losses, slopes = path_rules.weighted_likelihood(log_q, target=kept + self.c * corrected)
        if config.car:
            more, steeper = path_rules.overconfidence(log_q, weight=config.car * refused * q**config.gamma)
            losses, slopes = losses + more, slopes + steeper
        if config.beta:
            own, scale = self.one.own_law(part), config.beta * self.weight.alive[part]
            likelihood, reverse = path_rules.weighted_likelihood, path_rules.reverse_kl
            more, steeper = reverse(log_q, p=own) if config.kl == "reverse" else likelihood(log_q, target=own)
            losses, slopes = losses + scale * more, slopes + scale[:, None] * steeper
        return losses, slopes

    def _split(self, q: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """What is kept, what corrects and what is refused, weighed: [m, W] each."""
        weight = self.weight
        if weight.draws is None:
            split = path_rules.Split.of(self.one.law(part), q)
            refused = split.refused * weight.alive[part, None]
            return split.kept * weight.kept[part, None], split.corrected * weight.corrected[part, None], refused
        label = self.one.label[part, None]
        said = torch.zeros_like(q).scatter_(1, label.clamp_min(0), (label >= 0).to(q.dtype))
        refused = counted(weight.draws[part], like=q)
        return said * weight.kept[part, None], said * weight.corrected[part, None], refused

    def _score(self, kept: Tensor, corrected: Tensor, log_q: Tensor, part: slice) -> None:
        for number, target in enumerate((kept, corrected)):
            self.scores[number].index_add_(0, self.one.place[part], -(target * log_q).sum(dim=-1))


def _metrics(
    path: Sequence[OracleStep], said: Sequence[Tensor], fate: Fate, *, c: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """What the log tells: first guesses by depth, accepted tokens of a path, c."""
    rows = path[0].active.sum().float()
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for depth, (one, logits) in enumerate(zip(path, said, strict=True)):
        chosen = logits.gather(1, one.best[:, None])[:, 0] if len(logits) else logits.new_zeros(0)
        hits = chosen >= logits.amax(dim=-1) if len(logits) else chosen.bool()
        found[f"accuracy_{depth}"] = (hits.sum().float(), rows if depth == 0 else rows.new_tensor(float(len(logits))))
    found["accepted_tokens"] = (fate.kept.sum(), rows)
    found["rejection_weight"] = (rows * c, rows)
    return found


def _seed(batch: TrainingBatch, step: int) -> int:
    """A function of step and rows, so that two batches of one step draw differently and a resumed run draws alike."""
    return (step * 1_000_003 + int(batch.ids.sum())) % 2**62  # sync


def build(config: ObjectiveConfig, draft: object) -> VSD:
    """The objective for a draft with weights; others are refused."""
    assert isinstance(config, VSDConfig)
    if not isinstance(draft, DraftNetwork):
        raise ConfigError(f"objective vsd is defined for drafts with weights, not for {type(draft).__name__}")
    refuse_steps(draft, steps=config.steps, key="objective.options.steps")
    return VSD(config)


PLUGIN = ObjectivePlugin(config=VSDConfig, build=build)
