"""What a training step costs and where its time goes, against the arithmetic that the machine can do.

The same parts as the trainer's, one process, taken apart: states, forward, backward, optimiser.  It writes no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.machine import peak_memory
from paceline.store.figures import rounded
from paceline.training.capture_run import feature_source
from paceline.training.optimizers import Optimizers
from paceline.training.plan import RunPlan, Windows
from paceline.training.prepare import Job
from paceline.training.sources import FrozenTarget
from paceline.training.window import LossModule

KIND, FORMAT = "training-cost", 1
SIDE, REPEATS = 2048, 5  # square product that stands for the machine's peak
WARM_UP = 2
Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Means over `steps` steps of one micro-batch each.

    tokens, supervised: in a step.  seconds, gflop: of each part of a step; products only, as they were carried out.
    peak_gflop_per_s: the best of some square products in the run's precision.  memory: bytes, the process's peak.
    """

    steps: int
    tokens: float
    supervised: float
    seconds: dict[str, float]
    gflop: dict[str, float]
    peak_gflop_per_s: float
    memory: int

    @property
    def tokens_per_s(self) -> float:
        """Prompts included."""
        return self.tokens / sum(self.seconds.values())

    @property
    def share_of_peak(self) -> float:
        """Time that the products alone would take at the machine's peak, as a share of the time of a step."""
        return sum(self.gflop.values()) / self.peak_gflop_per_s / sum(self.seconds.values())


class _Steps:
    """Steps of a job's run, taken apart.  timed: a context for each part."""

    def __init__(self, job: Job) -> None:
        self._training = job.recipe.training
        is_bf16 = self._training.precision == "bf16"
        self._draft = job.draft.to(dtype=torch.float32).train()
        self._examples = job.lessons()
        self._source = feature_source(job, device=job.target.device, is_bf16=is_bf16)
        self._optimizers = Optimizers(self._draft, self._training)
        view = FrozenTarget(job.target)
        self._module = LossModule(self._draft, job.objective, view, is_bf16=is_bf16, is_anchored=False)
        self._windows = Windows(RunPlan(tuple(len(example.ids) for example in self._examples), self._training))

    def run(self, number: int, timed: Timed) -> tuple[int, int]:
        """Step `number`; returns its tokens and how many of them are supervised."""
        chosen = [self._examples[index] for index in self._windows.at(number, rank=0)[0]]
        for weight in self._draft.parameters():
            weight.grad = None
        with timed("states"):
            batch = self._source.batch(chosen)
        with timed("forward"):
            terms = self._module(batch, number)
        with timed("backward"):
            (terms.numerator / terms.denominator.clamp_min(1)).backward()
        with timed("optimiser"):
            torch.nn.utils.clip_grad_norm_(self._draft.parameters(), self._training.clip_norm or torch.inf)
            self._optimizers.step(share=0.1)
        return sum(len(example.ids) for example in chosen), sum(example.num_supervised for example in chosen)


def measure_training(job: Job, *, steps: int, watch: Callable[[int], None] = lambda done: None) -> TrainingCost:
    """Train `steps` steps after two that do not count, then count the operations of one more; the draft moves.

    watch: told the number of steps done.
    """
    peak = machine_peak(torch.bfloat16 if job.recipe.training.precision == "bf16" else torch.float32)
    run = _Steps(job).run
    seconds: dict[str, float] = {}
    gflop: dict[str, float] = {}
    tokens = supervised = 0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            seconds.clear()
            tokens = supervised = 0
        done = run(number, partial(_timed, seconds))
        tokens, supervised = tokens + done[0], supervised + done[1]
        watch(number + 1)
    counted, _ = run(WARM_UP + steps, partial(_counted, gflop))
    scale = tokens / steps / counted  # the counted step has about as many tokens as the others
    return TrainingCost(
        steps=steps, tokens=tokens / steps, supervised=supervised / steps,
        seconds={part: spent / steps for part, spent in seconds.items()},
        gflop={part: amount * scale for part, amount in gflop.items()}, peak_gflop_per_s=peak, memory=peak_memory(),
    )  # fmt: skip


def machine_peak(dtype: torch.dtype) -> float:
    """GFLOP/s of a square product, the best of some tries with torch's threads."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIDE, SIDE, generator=generator).to(dtype) for _ in range(2))
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - start)
    return 2e-9 * SIDE**3 / min(times)


def training_record(cost: TrainingCost, *, manifest: dict[str, Any]) -> dict[str, Any]:
    """Plain values, ready for JSON, figures rounded."""
    figures = {**asdict(cost), "tokens_per_s": cost.tokens_per_s, "share_of_peak": cost.share_of_peak}
    return {"kind": KIND, "format": FORMAT, "cost": rounded(figures), "manifest": manifest}


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Generator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start


@contextmanager
def _counted(gflop: dict[str, float], part: str) -> Generator[None]:
    with FlopCounterMode(display=False) as counter:
        yield
    gflop[part] = counter.get_total_flops() * 1e-9
