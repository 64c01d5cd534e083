"""One run of `paceline diagnose`: open what the options name, decode, write the record, print tables.

It knows the order of things; rounds are read and counted in `measure.diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from paceline.cli import _bench_setup as setup
from paceline.cli._bench_setup import OpenedDraft, PromptOptions, TargetOptions
from paceline.cli._opening import OTHERS, check_draft
from paceline.cli._outputs import check_record_path
from paceline.cli._plans import parse_plan
from paceline.cli._progress import Bar
from paceline.cli._tables import drawn
from paceline.data.chat import ChatFormat
from paceline.decoding.plan import ProposalPlan
from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError, DataError
from paceline.machine import set_threads
from paceline.measure.diagnose_plots import draw_diagnosis
from paceline.measure.diagnose_record import Diagnosed, Diagnosis, build_diagnosis
from paceline.measure.diagnose_run import diagnose_prompt
from paceline.measure.diagnose_tables import diagnose_tables
from paceline.measure.plots import require_matplotlib
from paceline.measure.record import write_record
from paceline.measure.systems import Sampling
from paceline.measure.workloads import Conversation, Workload, combined_digest, ids_digest, load_workload
from paceline.store.fingerprint import identify_target
from paceline.store.manifest import close_manifest, open_manifest, without_folders
from paceline.targets.generic import Target


@dataclass(frozen=True, slots=True)
class DiagnoseOptions:
    """All options of `paceline diagnose`, as its help explains them."""

    target: TargetOptions
    prompts: PromptOptions
    drafts: tuple[str, ...]
    plan: str
    max_new_tokens: int
    temperature: float
    top_p: float | None
    seed: int
    threads: int | None
    out: Path
    plots: Path | None
    force: bool

    @property
    def sampling(self) -> Sampling:
        """Raises ConfigError for options that exclude each other."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_p)

    def check(self) -> ProposalPlan:
        """The plan.  Raises ConfigError for what could only fail later."""
        plan = parse_plan(self.plan)
        if self.target.compile not in ("auto", "off"):
            raise ConfigError(f"--compile: found '{self.target.compile}', expected auto or off")
        for place, name in enumerate(self.drafts):
            if name in OTHERS:
                raise ConfigError(f"--draft: found '{name}', which has no law to look at; expected a draft's folder")
            if name in self.drafts[:place]:
                raise ConfigError(f"--draft: {name} is given twice; name each draft once")
            check_draft(name, others=())
        if self.plots is not None:
            require_matplotlib()
        check_record_path(self.out, may_replace=self.force)
        return plan


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the options named, opened.  prompts: those that fit, with their ids.  drafts: by the name that is shown."""

    target: Target
    chat: ChatFormat
    workload: Workload
    prompts: Sequence[tuple[Conversation, list[int]]]
    drafts: Mapping[str, OpenedDraft]
    warnings: Sequence[str]
    skipped: Sequence[str]


def run_diagnosis(options: DiagnoseOptions) -> None:
    """Decode, write, print."""
    sampling, plan = options.sampling, options.check()
    console = Console(highlight=False, soft_wrap=True)
    opened = _open(options)
    for warning in [*opened.warnings, *_skip_warning(opened)]:
        console.print(Text(f"warning: {warning}", style="yellow"))
    manifest = open_manifest(device=options.target.device, dtype=options.target.dtype, seed=options.seed)
    found: dict[str, list[Diagnosed]] = {name: [] for name in opened.drafts}
    with Bar(console, total=len(opened.prompts), text="decoding") as bar:
        for done, results in enumerate(_decode(opened, plan, sampling, seed=options.seed), start=1):
            for name, each in results.items():
                found[name].append(each)
            bar.update(done, _so_far(found))
    values = close_manifest(manifest, notes={}).as_dict()
    values = {name: value for name, value in values.items() if name != "notes"} | _conditions(opened, options, plan)
    record = build_diagnosis(
        Diagnosis(
            plan=str(plan),
            prompts=[f"{each.file}:{each.line}" for each, _ in opened.prompts],
            drafts={name: (draft.about or {}, found[name]) for name, draft in opened.drafts.items()},
            is_greedy=sampling.is_greedy,
            manifest=values,
            warnings=opened.warnings,
            skipped=opened.skipped,
            seed=options.seed,
        )
    )
    write_record(options.out, record)
    _print(console, record, options)


def _open(options: DiagnoseOptions) -> _Opened:
    workload = load_workload(options.prompts.files, prompts_per_file=options.prompts.per_file)
    set_threads(options.threads, option="--threads")
    warnings: list[str] = []
    target = setup.open_target(options.target)
    names = _names(options.drafts)
    drafts = {
        name: setup.open_draft(folder, target, warn=warnings.append)
        for name, folder in zip(names, options.drafts, strict=True)
    }
    template = setup.template_options(options.prompts.template, thinking=options.prompts.thinking)
    chat = ChatFormat(target.tokenizer, options=template)
    prompts = [(each, chat.prompt_ids(each.prompt.messages)) for each in workload.conversations]
    limit = target.max_positions
    fitting = [(each, ids) for each, ids in prompts if limit is None or len(ids) + options.max_new_tokens <= limit]
    if not fitting:
        raise DataError(
            f"no prompt fits: the target takes {limit} tokens, prompt and {options.max_new_tokens} new ones together"
        )
    kept = {each.number for each, _ in fitting}
    long = [
        f"{each.file}:{each.line}: longer than the target's context" for each, _ in prompts if each.number not in kept
    ]
    longest = max(len(ids) for _, ids in fitting) + options.max_new_tokens
    lengths = [setup.length_warning(draft, longest=longest) for draft in drafts.values()]
    warnings += dict.fromkeys(line for line in lengths if line)
    return _Opened(target, chat, workload, fitting, drafts, warnings, [*workload.skipped, *long])


def _names(folders: Sequence[str]) -> list[str]:
    """What tables call each draft: its folder as given, without the way there, told apart by a number."""
    names: list[str] = []
    for folder in folders:
        name, number = without_folders(folder.rstrip("/")), 1
        while name in names:
            number += 1
            name = f"{without_folders(folder.rstrip('/'))} ({number})"
        names.append(name)
    return names


def _skip_warning(opened: _Opened) -> list[str]:
    if not opened.skipped:
        return []
    return [f"{len(opened.skipped)} of {opened.workload.num_rows} rows skipped; first: {opened.skipped[0]}"]


def _decode(opened: _Opened, plan: ProposalPlan, sampling: Sampling, *, seed: int) -> Iterator[dict[str, Diagnosed]]:
    """Each prompt with every draft."""
    for conversation, ids in opened.prompts:
        results: dict[str, Diagnosed] = {}
        for name, opened_draft in opened.drafts.items():
            draft = opened_draft.draft
            assert isinstance(draft, DraftNetwork)
            results[name] = diagnose_prompt(
                opened.target, draft, ids, plan=plan, sampling=sampling, seed=seed + conversation.number
            )
        yield results


def _so_far(found: Mapping[str, Sequence[Diagnosed]]) -> str:
    """Running accepted lengths."""
    lengths: list[str] = []
    for name, results in found.items():
        rounds = sum(each.stats.rounds for each in results)
        lengths.append(f"{name} L {sum(each.stats.emitted for each in results) / max(rounds, 1):.2f}")
    return ", ".join(lengths)


def _conditions(opened: _Opened, options: DiagnoseOptions, plan: ProposalPlan) -> dict[str, Any]:
    """What a manifest adds, as plain values, under the names that bench records use."""
    identity = identify_target(opened.target)
    sampling = options.sampling
    return {
        "target": {"name": identity.name, "fingerprint": identity.digest, "revision": options.target.revision},
        "drafts": {name: draft.about for name, draft in opened.drafts.items()},
        "plan": str(plan),
        "prompt_digest": combined_digest(ids_digest(ids) for _, ids in opened.prompts),
        "files": opened.workload.files,
        "template": {"options": dict(opened.chat.options), "digest": opened.chat.template_digest()},
        "sampling": {**asdict(sampling), "is_greedy": sampling.is_greedy},
        "dtype": options.target.dtype,
        "device": options.target.device,
        "compile": options.target.compile,
        "engine": opened.target.engine,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
    }


def _print(console: Console, record: Mapping[str, Any], options: DiagnoseOptions) -> None:
    for table in diagnose_tables(record):
        console.print(drawn(table))
    if record["identical"] is False:
        console.print(
            Text("The drafts' greedy outputs differ: see paceline bench for where and why.", style="bold red")
        )
    console.print(f"record: {options.out}")
    for picture in draw_diagnosis(record, folder=options.plots, name=options.out.stem) if options.plots else ():
        console.print(f"picture: {picture}")
