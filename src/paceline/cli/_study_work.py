"""What a study's processes do: train one cell, or decode the prompts with all drafts of one seed in turns.

Both go on where a killed one stopped; what is done and what comes next is for `_study_run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli import _bench_setup as setup
from paceline.cli._bench_setup import BenchOptions, DecoderOptions, OpenedDraft, PromptOptions, TargetOptions
from paceline.cli._child import Tell
from paceline.cli._plans import parse_plan
from paceline.config import TargetSection, parse_recipe
from paceline.data.chat import ChatFormat
from paceline.machine import set_threads
from paceline.measure.bench import Bench
from paceline.measure.ledger import Ledger, Observation
from paceline.measure.metrics import Measured
from paceline.measure.study import system_name
from paceline.measure.systems import PLAIN, draft_system, plain_system
from paceline.measure.workloads import load_workload
from paceline.store.draft_names import find_draft
from paceline.store.files import write_text
from paceline.training.study import MeasureSection
from paceline.training.trainer import train


@dataclass(frozen=True, slots=True)
class SeedBench:
    """One interleaved run.  drafts: arm -> its folder.  template: options of the chat template.  out: its result."""

    target: TargetSection
    drafts: dict[str, str]
    measure: MeasureSection
    temperature: float
    seed: int
    template: dict[str, Any]
    out: Path

    @property
    def options(self) -> BenchOptions:
        """The run as `paceline bench` knows it."""
        measure, target = self.measure, self.target
        return BenchOptions(
            target=TargetOptions(
                target.name, target.revision, measure.dtype, measure.device, "auto", target.trust_remote_code
            ),
            prompts=PromptOptions(measure.workloads, measure.prompts_per_file, "first", None, ()),
            decoders=DecoderOptions("several", measure.plans, "", None),
            max_new_tokens=measure.max_new_tokens, temperature=self.temperature, top_p=None,
            # Each seed of training samples other texts: its own error is then in the figures.
            seed=measure.seed + 1000 * self.seed,
            warmup=measure.warmup, threads=measure.threads, outs=(self.out,), plots=None, resume=True, force=False,
        )  # fmt: skip


def train_cell(tell: Tell, recipe: str, out: str, start: str | None) -> None:
    """Train a recipe (TOML text) into `out`, from the draft in `start` if there is one; goes on where it stopped."""
    init_from = None if start is None else find_draft(start)
    train(parse_recipe(recipe, source="the study"), out=Path(out), watch=_Watch(tell), resume=True, init_from=init_from)


def bench_seed(tell: Tell, job: SeedBench) -> None:
    """Decode the prompts plainly and with each draft and plan, in turns, and write the observations to `job.out`."""
    bench, conditions, workload = _open(job)
    ledger = Ledger(job.out, settings=conditions, resume=True)
    try:
        remaining = bench.remaining(workload, ledger=ledger)
        total = len(remaining) + len(ledger.done)
        if remaining:
            bench.warm_up(workload)
        for _ in bench.run(workload, ledger=ledger):
            tell(len(ledger.done), total, _lengths([each for done in ledger.done.values() for each in done], job))
        observations = [asdict(each) for number in sorted(ledger.done) for each in ledger.done[number]]
        long = [f"{each.file}:{each.line}: longer than the target's context" for each in bench.too_long(workload)]
        found = {
            "conditions": {**conditions, "sittings": ledger.sittings},
            "skipped": [*workload.skipped, *long],
            "observations": observations,
        }
        write_text(job.out, json.dumps(found) + "\n")
    finally:
        ledger.close()
    ledger.remove()


def _open(job: SeedBench) -> tuple[Bench, dict[str, Any], Any]:
    options = job.options
    workload = load_workload(options.prompts.files, prompts_per_file=options.prompts.per_file)
    set_threads(options.threads, option="measure.threads")
    target = setup.open_target(options.target)
    opened = {arm: setup.open_draft(folder, target, warn=print) for arm, folder in job.drafts.items()}
    sampling = options.protocol.sampling
    systems = [plain_system(target, sampling=sampling)]
    for arm, draft in opened.items():
        assert draft.draft is not None, "a study's drafts have folders"
        systems += [
            draft_system(
                target, draft.draft, plan=parse_plan(plan), sampling=sampling, name=system_name(arm, plan)
            )
            for plan in job.measure.plans
        ]  # fmt: skip
    bench = Bench(target, ChatFormat(target.tokenizer, options=job.template), systems, options.protocol)
    abouts: dict[str, Any] = {arm: draft.about for arm, draft in opened.items()}
    conditions = setup.conditions(bench, workload, options=options, draft=OpenedDraft(None, abouts))
    return bench, conditions, workload


def _lengths(observations: list[Observation], job: SeedBench) -> str:
    """Running accepted length of each arm with the first plan."""

    def length(calls: list[Measured]) -> float:
        return sum(call.emitted for call in calls) / max(sum(call.rounds for call in calls), 1)

    plan = job.measure.plans[0]
    figures = [
        f"{arm} L {length([each.results[system_name(arm, plan)] for each in observations]):.2f}" for arm in job.drafts
    ]
    plain = [each.results[PLAIN] for each in observations]
    rate = sum(call.tokens for call in plain) / max(sum(call.wall for call in plain), 1e-9)
    return f"{', '.join(figures)} ({plan}), plain {rate:.1f} tokens/s"


class _Watch:
    """Tells the parent every step; lines for people go to the log."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def say(self, text: str) -> None:
        """A line of the log."""
        print(text, flush=True)

    def step(self, done: int, total: int, values: Mapping[str, Any]) -> None:
        """Where it stands."""
        length = values["accepted_length"]
        self._tell(done, total, f"L {'-' if length is None else f'{length:.2f}'}")

    def line(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """The run's own log.jsonl has it."""
        return
