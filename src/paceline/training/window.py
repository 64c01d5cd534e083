"""The gradient of one window, right whatever the sizes: numerators are summed, then divided once by the sum of weights.

A window is a few micro-batches on each process.  This module knows accelerate and the objective's contract; it knows
neither schedule, optimiser nor files, and refuses to hand out a gradient that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from torch import nn

from paceline.data.examples import Example
from paceline.drafts._base import DraftNetwork
from paceline.errors import DataError
from paceline.records import LossTerms
from paceline.training.objectives._base import Objective, TargetView, TrainingBatch
from paceline.training.sources import FeatureSource

SHOWN = 5  # rows named in an error


class LossModule(nn.Module):
    """A draft and its objective as one forward call, which data parallelism needs to see.

    is_anchored: tie every parameter to every loss with weight zero, so that a process without a supervised token takes
    part in the exchange of gradients like all others, instead of leaving them waiting.
    """

    def __init__(
        self, draft: DraftNetwork, objective: Objective, target: TargetView, *, is_bf16: bool, is_anchored: bool
    ) -> None:
        super().__init__()
        self.draft, self.objective, self.target = draft, objective, target
        self.is_bf16, self.is_anchored = is_bf16, is_anchored

    def forward(self, batch: TrainingBatch | None, step: int) -> LossTerms:
        """Loss terms of a batch; of nothing (0 / 0) for None."""
        # torch's own autocast: accelerate fixes one precision for the life of the process, a recipe may change it.
        device = next(self.draft.parameters()).device
        zero = torch.zeros((), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.is_bf16):
            terms = (
                LossTerms(zero, zero)
                if batch is None
                else self.objective.loss(self.draft, batch, self.target, step=step)
            )
        if not self.is_anchored and terms.numerator.requires_grad:
            return terms
        anchor = torch.stack([parameter.sum() * 0 for parameter in self.draft.parameters()]).sum()
        return replace(terms, numerator=terms.numerator + anchor)


@dataclass(frozen=True, slots=True)
class WindowSums:
    """What a window came to.

    numerator, denominator: of the loss, over all processes.  gradient_norm: before clipping.
    metrics: name -> (numerator, denominator), tokens, padded, supervised: of this process alone.
    """

    numerator: float
    denominator: float
    gradient_norm: float
    tokens: int = 0
    padded: int = 0
    supervised: int = 0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no token of any process was supervised; then there is no gradient."""
        return self.denominator == 0


class GradientWindow:
    """Computes gradients; after `run` they lie in the draft's parameters, averaged and clipped.

    module: as `accelerator.prepare` returned it.  clip_norm: 0 = off.
    """

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, *, draft: nn.Module, source: FeatureSource, clip_norm: float
    ) -> None:
        self._accelerator, self._module, self._source = accelerator, module, source
        self._parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self._clip_norm = clip_norm or math.inf

    def run(self, batches: Sequence[Sequence[Example]], *, step: int) -> WindowSums:
        """Forward and backward over this process's micro-batches; every process of the run must call it.

        Raises DataError naming the rows when a loss or a gradient is NaN or infinite; no weight has moved then.
        """
        for parameter in self._parameters:
            parameter.grad = None
        terms: list[LossTerms] = []
        tokens = padded = supervised = 0
        for place, examples in enumerate(batches or ((),)):
            batch = self._source.batch(examples) if examples else None
            is_last = place == max(len(batches) - 1, 0)
            with nullcontext() if is_last else self._accelerator.no_sync(self._module):
                found = self._module(batch, step)
                self._accelerator.backward(found.numerator)
            terms.append(_detached(found))
            if batch is not None:
                tokens += sum(len(example.ids) for example in examples)
                padded += batch.ids.numel()
                supervised += sum(example.num_supervised for example in examples)
        own = _to_floats(terms)
        numerator, denominator = self._totals(own)
        self._refuse_bad_loss(own, batches, total=numerator, step=step)
        norm = self._average(denominator, batches, step=step) if denominator else 0.0
        metrics = _sum_metrics(terms)
        return WindowSums(numerator, denominator, norm, tokens, padded, supervised, metrics)

    def _totals(self, own: list[tuple[float, float]]) -> tuple[float, float]:
        """Sums of numerators and denominators over micro-batches and processes."""
        device = self._accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.tensor([sum(pair[0] for pair in own), sum(pair[1] for pair in own)], dtype=dtype, device=device)
        total = self._accelerator.reduce(sums, "sum")
        assert isinstance(total, torch.Tensor)
        numerator, denominator = total.tolist()  # sync
        return numerator, denominator

    def _average(self, denominator: float, batches: Sequence[Sequence[Example]], *, step: int) -> float:
        """Divide the summed gradients by the sum of weights, clip them, and return their norm before clipping."""
        share = self._accelerator.num_processes / denominator  # data parallelism has already divided by the former
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(share)
        norm = self._accelerator.clip_grad_norm_(self._parameters, self._clip_norm)
        assert norm is not None
        value = float(norm)  # sync
        if not math.isfinite(value):
            raise DataError(
                f"step {step + 1}: the gradient is {value} in a window with the rows {_names(batches)}; no weight was "
                "changed: lower training.learning_rate, or drop the rows"
            )
        return value

    def _refuse_bad_loss(
        self, own: list[tuple[float, float]], batches: Sequence[Sequence[Example]], *, total: float, step: int
    ) -> None:
        if math.isfinite(total):
            return
        for (numerator, _), examples in zip(own, batches, strict=False):
            if not math.isfinite(numerator):
                raise DataError(f"step {step + 1}: {self._explain(examples)}; no weight was changed: drop these rows")
        raise DataError(f"step {step + 1}: the loss of another process is not finite; its message names the rows")

    def _explain(self, examples: Sequence[Example]) -> str:
        for example in examples:
            batch = self._source.batch([example])
            if not bool(batch.taps.isfinite().all() & batch.hidden.isfinite().all()):
                return f"the target's states of {example.source} hold NaN or infinity"
        return f"the loss is not finite in a batch of {_names([examples])}"


def _detached(terms: LossTerms) -> LossTerms:
    metrics = {name: (one.detach(), two.detach()) for name, (one, two) in terms.metrics.items()}
    return LossTerms(terms.numerator.detach(), terms.denominator.detach(), metrics)


def _to_floats(terms: list[LossTerms]) -> list[tuple[float, float]]:
    both = torch.stack([torch.stack([found.numerator.float(), found.denominator.float()]) for found in terms])
    return [(one, two) for one, two in both.tolist()]  # sync


def _sum_metrics(terms: list[LossTerms]) -> dict[str, tuple[float, float]]:
    pairs = [(name, pair) for found in terms for name, pair in found.metrics.items()]
    if not pairs:
        return {}
    flat = torch.stack([value.float() for _, pair in pairs for value in pair]).view(-1, 2).tolist()  # sync
    sums: dict[str, tuple[float, float]] = {}
    for (name, _), (top, bottom) in zip(pairs, flat, strict=True):
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + top, before[1] + bottom)
    return sums


def _names(batches: Sequence[Sequence[Example]]) -> str:
    names = [example.source for batch in batches for example in batch]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
