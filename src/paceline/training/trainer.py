"""The one training loop: gradients of a window, one optimiser step, a line in the log, a score, a state on the disk.

It runs on accelerate and knows neither draft nor objective.  What it leaves in the output folder:

    recipe.toml   the recipe of this run          best/    the draft with the highest simulated accepted length
    log.jsonl     one event per line              last/    the draft of the last save
    state/        the last two states, to resume from

A run that is killed at any moment and resumed ends bit for bit as one that was not (CPU, same number of threads).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from paceline.config import Recipe, dump_recipe
from paceline.drafts._base import DraftNetwork
from paceline.errors import CheckpointError, ConfigError
from paceline.machine import return_freed_memory, set_threads
from paceline.store.checkpoint import read_info, save_draft
from paceline.store.files import Claim, write_text
from paceline.store.manifest import close_manifest, open_manifest
from paceline.store.training_state import latest_state, write_state
from paceline.targets.generic import Target
from paceline.training.capture_run import feature_source
from paceline.training.folder import BEST, LAST, RECIPE, STATE, begin_folder, check_folder
from paceline.training.log import Meter, RunLog
from paceline.training.optimizers import Optimizers
from paceline.training.parallel import make_accelerator
from paceline.training.plan import RunPlan, Windows
from paceline.training.prepare import Job, Say, describe_run, prepare, recipe_target, with_score
from paceline.training.schedule import peak_share
from paceline.training.snapshot import Counters, check_identity, identity_of, put_state, take_state
from paceline.training.sources import FrozenTarget
from paceline.training.validation import Score, Validator, taught_length
from paceline.training.window import GradientWindow, LossModule, WindowSums

GAP, FAINT = 2.0, 0.1  # how many times more a draft may promise on its own rows than it keeps on others
CHANCE = 1.05  # accepted length below which a draft has not begun to help: nearly every round is the target's alone


class Watch(Protocol):
    """What a run tells whoever looks on; the command line draws a progress bar."""

    def say(self, text: str) -> None:
        """One line for people."""
        ...

    def step(self, done: int, total: int, values: Mapping[str, Any]) -> None:
        """After every optimiser step; values: loss and accepted_length (None if there is none), tokens, seconds."""
        ...

    def line(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Every line of the log, as it is written."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended.  best: highest simulated accepted length and its step.  last: the score at the end."""

    steps: int
    best: float | None
    best_step: int | None
    last: float | None
    seconds: float


def train(
    recipe: Recipe,
    *,
    out: Path,
    watch: Watch,
    target: Target | None = None,
    resume: bool = False,
    init_from: Path | None = None,
) -> TrainingResult:
    """Train a draft.

    out: folder of the run.  target: one that is in memory, or None to load the recipe's.  resume: go on from the last
    whole state in `out`, or begin where there is none.  init_from: a draft's folder to start the weights from.
    Raises PacelineError before the first step for whatever the user can mend.
    """
    set_threads(recipe.training.threads, option="training.threads")
    check_folder(out, resume=resume)
    if init_from is not None:
        _check_start(init_from)
    accelerator = make_accelerator(recipe.training, out=out, target=target)
    say = watch.say if accelerator.is_main_process else _silent
    if target is None:
        target = recipe_target(recipe, device=str(accelerator.device))
    job = prepare(recipe, target=target, init_from=init_from, say=say)
    trainer = Trainer(job, out=out, accelerator=accelerator, watch=watch, say=say)
    with Claim(out) if accelerator.is_main_process else nullcontext():
        return trainer.run(resume=resume)


class Trainer:
    """One run.  job: what `prepare` made.  say: one line for people, on the first process only."""

    def __init__(self, job: Job, *, out: Path, accelerator: Accelerator, watch: Watch, say: Say) -> None:
        self.job, self.out, self.accelerator, self.watch = job, out, accelerator, watch
        self.training = job.recipe.training
        self._say = say
        self.draft: DraftNetwork = job.draft.to(device=accelerator.device, dtype=torch.float32).train()
        self._lessons = job.lessons()
        lengths = tuple(len(example.ids) for example in self._lessons)
        self.plan = RunPlan(lengths, self.training, world=accelerator.num_processes)
        self._windows = Windows(self.plan)  # refuses batches that cannot be, before anything is written
        self.optimizers = Optimizers(self.draft, self.training)
        is_bf16 = self.training.precision == "bf16"
        view, source = FrozenTarget(job.target), feature_source(job, device=accelerator.device, is_bf16=is_bf16)
        module = LossModule(self.draft, job.objective, view, is_bf16=is_bf16, is_anchored=accelerator.num_processes > 1)
        self._gradients = GradientWindow(
            accelerator,
            accelerator.prepare(module),
            draft=self.draft,
            source=source,
            clip_norm=self.training.clip_norm,
        )
        self._validator = Validator(
            job.examples.validation,
            source=source,
            target=view,
            accelerator=accelerator,
            depth=job.recipe.validation.depth,
            max_tokens=self.training.tokens_per_batch,
            is_bf16=is_bf16,
        )
        self._counters, self._meter = Counters(), Meter()
        self._identity = identity_of(
            job.recipe, examples=job.examples, target=job.info.target.digest, world=accelerator.num_processes
        )
        self._manifest = open_manifest(
            device=str(accelerator.device), dtype=self.training.precision, seed=self.training.seed,
            files=(*job.recipe.data.train, *job.recipe.data.validation), notes={"target": job.info.target.digest},
        )  # fmt: skip
        self._log: RunLog
        self._began = 0.0
        self._taught: float | None = None  # see taught_length

    def run(self, *, resume: bool = False) -> TrainingResult:
        """From the first step, or the last state, to the end."""
        for line in describe_run(self.plan, self.job):
            self._say(line)
        self._begin(resume=resume)
        windows, total = self._windows, self.plan.steps
        self._began = time.monotonic() - self._counters.seconds
        for step in range(self._counters.step, total):
            share = peak_share(
                step, total=total, warmup=self.training.warmup_steps, min_ratio=self.training.min_lr_ratio
            )
            started = time.monotonic()
            batches = windows.at(step, rank=self.accelerator.process_index)
            sums = self._gradients.run([[self._lessons[index] for index in batch] for batch in batches], step=step)
            if not sums.is_empty:
                self.optimizers.step(share=share)
            self._counters.step = done = step + 1
            self._count(sums, seconds=time.monotonic() - started)
            self._show(sums, total=total, seconds=time.monotonic() - started)
            if done % self.training.log_every == 0 or done == total:
                self._write_line(sums, rate=share * self.training.learning_rate, epoch=windows.epoch_of(step))
            if done % self.training.validate_every == 0 or done == total:
                self._validate()
            if done % self.training.save_every == 0 or done == total:
                self._save()
        return self._finish()

    def _begin(self, *, resume: bool) -> None:
        """Put the last state back, if there is one to resume, and open the log."""
        torch.set_rng_state(
            torch.Generator().manual_seed(self.training.seed + self.accelerator.process_index).get_state()
        )
        state = latest_state(self.out / STATE, say=self._say) if resume else None
        if state is not None:
            found, best = state.values["identity"], str(self.out / BEST)
            check_identity(found, expected=self._identity, where=str(self.out), best=best)
            self._counters = put_state(
                state, self.draft, self.optimizers, self.job.objective,
                accelerator=self.accelerator, where=str(self.out / STATE),
            )  # fmt: skip
            if self.accelerator.is_main_process:
                self._meter = Meter(self._counters.meter)
            self._say(f"resumed at step {state.step} of {self.plan.steps}")
        elif resume:
            self._say(f"nothing to resume in {self.out}: begins at step 0")
        if self.accelerator.is_main_process:
            begin_folder(self.out)
            track = self._track if self.training.trackers else None
            self._log = RunLog(self.out, keep_until=None if state is None else state.step, track=track)
            write_text(self.out / RECIPE, dump_recipe(self.job.recipe))
        self.accelerator.wait_for_everyone()

    def _count(self, sums: WindowSums, *, seconds: float) -> None:
        self._meter.add_count("busy", seconds / self.accelerator.num_processes)
        if self.accelerator.is_main_process:
            self._meter.add_ratio("loss", numerator=sums.numerator, denominator=sums.denominator)
            self._meter.add_count("empty_steps", sums.is_empty)
        for name, (numerator, denominator) in sums.metrics.items():
            self._meter.add_ratio(name, numerator=numerator, denominator=denominator)
        for name, amount in (("tokens", sums.tokens), ("padded", sums.padded), ("supervised", sums.supervised)):
            self._meter.add_count(name, amount)

    def _show(self, sums: WindowSums, *, total: int, seconds: float) -> None:
        if self.accelerator.is_main_process:
            loss = None if sums.is_empty else sums.numerator / sums.denominator
            values = {"loss": loss, "accepted_length": self._counters.last, "tokens": sums.tokens, "seconds": seconds}
            self.watch.step(self._counters.step, total, values)

    def _gather_meter(self) -> None:
        """All processes' sums since the last line, in the meter of the first."""
        if self.accelerator.num_processes == 1:
            return
        found = gather_object([self._meter.values()])
        self._meter = Meter()
        if self.accelerator.is_main_process:
            for values in found:
                self._meter.merge(values)

    def _write_line(self, sums: WindowSums, *, rate: float, epoch: int) -> None:
        self._gather_meter()
        if self.accelerator.is_main_process:
            counts = self._meter.counts
            self._counters.supervised += int(counts["supervised"])
            averages = self._meter.averages()
            self._taught = taught_length(averages)
            values = {
                **averages,
                "learning_rate": rate,
                "gradient_norm": sums.gradient_norm,
                "epoch": epoch,
                "tokens": int(counts["tokens"]),
                "supervised_tokens": self._counters.supervised,
                "tokens_per_s": counts["tokens"] / max(counts["busy"], 1e-9),
                "padding": 1 - counts["tokens"] / max(counts["padded"], 1),
                "seconds": time.monotonic() - self._began,
            }
            if counts["empty_steps"]:
                values["steps_without_a_supervised_token"] = int(counts["empty_steps"])
                self._say(f"warning: {int(counts['empty_steps'])} steps had no supervised token and changed nothing")
            elif averages["loss"] == 0:
                self._say(f"warning: the loss is exactly 0 at step {self._counters.step}: nothing is learnt from it")
            self._write("train", values)
        self._meter = Meter()
        return_freed_memory()

    def _write(self, event: str, values: dict[str, Any]) -> None:
        self._log.write(event, step=self._counters.step, values=values)
        self.watch.line(event, self._counters.step, values)

    def _validate(self) -> None:
        started = time.monotonic()
        score = self._validator.score(self.draft)
        self._counters.last = score.accepted_length
        is_best = self._counters.best is None or score.accepted_length > self._counters.best
        if is_best:
            self._counters.best, self._counters.best_step = score.accepted_length, self._counters.step
        if self.accelerator.is_main_process:
            values = {**asdict(score), "is_best": is_best, "took": time.monotonic() - started}
            self._write("validation", values)
            self._say(
                f"step {self._counters.step}: accepted length {score.accepted_length:.3f} +- "
                f"{score.standard_error:.3f} ({score.rounds} rounds){', the best so far' if is_best else ''}"
            )
            self._warn_of_gap(score)
            if is_best:
                self._save_draft(BEST)

    def _warn_of_gap(self, score: Score) -> None:
        """Good on the rows it trains on and not on others: learnt by heart, or training and decoding differ."""
        reached = score.accepted_length
        if self._taught is not None and self._taught - 1 > GAP * max(reached - 1, FAINT):
            self._say(
                f"warning: on the rows it trains on the draft guesses as if the accepted length were "
                f"{self._taught:.2f}; on held-out rows it is {reached:.2f}: it has learnt these rows by heart (more "
                "and other rows help), or the held-out rows are of another kind"
            )

    def _save(self) -> None:
        self._gather_meter()
        self._counters.meter, self._counters.seconds = self._meter.values(), time.monotonic() - self._began
        state = take_state(
            self.draft,
            self.optimizers,
            self.job.objective,
            counters=self._counters,
            identity=self._identity,
            accelerator=self.accelerator,
        )
        if self.accelerator.is_main_process:
            self._save_draft(LAST)
            write_state(self.out / STATE, state)
        self.accelerator.wait_for_everyone()

    def _save_draft(self, name: str) -> None:
        counters = self._counters
        info = with_score(self.job.info, step=counters.step, supervised=counters.supervised, score=counters.last)
        save_draft(
            self.out / name,
            self.draft,
            info=info,
            dtype=self.training.save_dtype,
            recipe=self.job.recipe,
            manifest=close_manifest(self._manifest),
        )

    def _finish(self) -> TrainingResult:
        counters, best = self._counters, self._counters.best
        if self.accelerator.is_main_process and best is not None:
            if best < CHANCE:
                self._say(
                    f"trained {counters.step} steps, but the draft is not useful yet: accepted length {best:.3f}, "
                    "where 1 means that nothing is accepted; train longer, on more rows"
                )
            else:
                self._say(
                    f"trained {counters.step} steps; best accepted length {best:.3f} at step {counters.best_step}"
                )
            self._say(f"the best draft is in {self.out / BEST}")
        if self.training.trackers:
            self.accelerator.end_training()
        return TrainingResult(counters.step, best, counters.best_step, counters.last, counters.seconds)

    def _track(self, values: dict[str, float], step: int) -> None:
        self.accelerator.log(values, step=step)


def _check_start(folder: Path) -> None:
    """Refuse what is no draft before a target is loaded and rows are read."""
    try:
        read_info(folder)
    except CheckpointError as error:
        raise ConfigError(f"--init-from: {error}") from error


def _silent(_text: str) -> None:
    """What the other processes say."""
