"""One run of `paceline bench`: measure with a progress bar, write the records, print tables and the plain verdict.

It knows the order of things; figures come from `measure`, and what the options name is opened in `_bench_setup`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from paceline.cli import _bench_setup as setup
from paceline.cli._bench_setup import BenchOptions, Decoders, OpenedDraft
from paceline.cli._busy import busy_warning
from paceline.cli._progress import Bar, interruptible
from paceline.cli._tables import drawn
from paceline.data.chat import ChatFormat
from paceline.machine import set_threads
from paceline.measure.bench import Bench
from paceline.measure.ledger import Ledger, Observation, refuse_leftover
from paceline.measure.plots import draw
from paceline.measure.record import Measurement, build_record, write_record
from paceline.measure.report import bench_tables
from paceline.measure.systems import PLAIN, System
from paceline.measure.workloads import Workload, load_workload
from paceline.store.manifest import close_manifest, open_manifest


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the options named, opened."""

    bench: Bench
    workload: Workload
    decoders: Decoders
    draft: OpenedDraft
    conditions: dict[str, Any]
    warnings: list[str]

    @property
    def skipped(self) -> list[str]:
        """Rows that are not decoded, "file:line: reason" each."""
        too_long = self.bench.too_long(self.workload)
        return [
            *self.workload.skipped,
            *(f"{each.file}:{each.line}: longer than the target's context" for each in too_long),
        ]


def run_bench(options: BenchOptions) -> bool:
    """Measure, write, print.  Returns whether greedy float32 outputs differed, which must never happen."""
    options.check()
    paths = setup.record_paths(options)
    refuse_leftover(paths[0], resume=options.resume)
    console = Console(highlight=False, soft_wrap=True)
    opened = _open(options)
    for warning in [*opened.warnings, *_skip_warning(opened)]:
        console.print(Text(f"warning: {warning}", style="yellow"))
    manifest = open_manifest(device=options.target.device, dtype=options.target.dtype, seed=options.seed)
    ledger = Ledger(
        paths[0], settings=opened.conditions, resume=options.resume, replaces=paths if options.force else ()
    )
    try:
        with interruptible(lambda: f"{len(ledger.done)} conversations are kept in {ledger.path}; go on with --resume"):
            _measure(opened, ledger, console)
        notes = {**opened.conditions, "sittings": ledger.sittings}
        values = close_manifest(manifest).as_dict()
        values = {**{name: value for name, value in values.items() if name != "notes"}, **notes}
        records = [build_record(run) for run in _measurements(opened, ledger, values)]
        for path, record in zip(paths, records, strict=True):
            ledger.begin_record(path)
            write_record(path, record)
    finally:
        ledger.close()
    ledger.remove()
    _print(console, records[0])
    for path, record in zip(paths, records, strict=True):
        console.print(f"record: {path}")
        for picture in draw(record, folder=options.plots, name=path.stem) if options.plots is not None else ():
            console.print(f"picture: {picture}")
    return options.target.dtype == "float32" and any(record["identical"] is False for record in records)


def _open(options: BenchOptions) -> _Opened:
    protocol = options.protocol
    workload = load_workload(options.prompts.files, prompts_per_file=options.prompts.per_file)
    set_threads(options.threads, option="--threads")
    warnings: list[str] = []
    target = setup.open_target(options.target)
    draft = setup.open_draft(options.decoders.draft, target, warn=warnings.append)
    decoders = setup.open_decoders(target, draft.draft, options=options.decoders, protocol=protocol)
    template = setup.template_options(options.prompts.template, thinking=options.prompts.thinking)
    bench = Bench(target, ChatFormat(target.tokenizer, options=template), decoders.all, protocol)
    conditions = setup.conditions(bench, workload, options=options, draft=draft)
    longest = max(len(bench.chat.prompt_ids(each.prompt.messages)) for each in workload.conversations)
    length = setup.length_warning(draft, longest=longest + options.max_new_tokens)
    return _Opened(bench, workload, decoders, draft, conditions, [*warnings, *([length] if length else [])])


def _skip_warning(opened: _Opened) -> list[str]:
    """One line if rows are left out; the record lists them in a place of its own."""
    skipped = opened.skipped
    if not skipped:
        return []
    return [f"{len(skipped)} of {opened.workload.num_rows} rows skipped; first: {skipped[0]}"]


def _measure(opened: _Opened, ledger: Ledger, console: Console) -> None:
    bench, workload = opened.bench, opened.workload
    remaining = bench.remaining(workload, ledger=ledger)
    if not remaining:
        return
    total = len(remaining) + len(ledger.done)
    with Bar(console, total=total, text="warming up", done=len(ledger.done)) as bar:
        bench.warm_up(workload)
        with busy_warning(console, threads=torch.get_num_threads()):
            for _ in bench.run(workload, ledger=ledger):
                text = _so_far([each for done in ledger.done.values() for each in done], opened.decoders)
                bar.update(len(ledger.done), text)


def _so_far(observations: Sequence[Observation], decoders: Decoders) -> str:
    """Running figures of the first plan, or of plain decoding."""
    plain = [each.results[PLAIN] for each in observations]
    rate = sum(call.tokens for call in plain) / sum(call.wall for call in plain)
    if not decoders.drafted:
        return f"plain {rate:.1f} tokens/s"
    draft = [each.results[decoders.drafted[0].name] for each in observations]
    length = sum(call.emitted for call in draft) / max(sum(call.rounds for call in draft), 1)
    faster = sum(call.tokens for call in draft) / sum(call.wall for call in draft) / rate
    return f"L {length:.2f}, {faster:.2f}x plain"


def _measurements(opened: _Opened, ledger: Ledger, manifest: Mapping[str, Any]) -> list[Measurement]:
    """One per plan, the others of the same run beside it; one without a draft."""
    observations = [each for number in sorted(ledger.done) for each in ledger.done[number]]
    drafted = opened.decoders.drafted
    subjects: Sequence[System | None] = drafted or (None,)
    return [
        Measurement(
            observations=observations,
            draft=subject,
            others=[system for system in drafted if system is not subject],
            baselines=opened.decoders.baselines,
            is_greedy=opened.bench.protocol.sampling.is_greedy,
            manifest={**manifest, "plan": subject.name if subject is not None else None},
            warnings=opened.warnings,
            skipped=opened.skipped,
            seed=opened.bench.protocol.seed,
        )
        for subject in subjects
    ]


def _print(console: Console, record: Mapping[str, Any]) -> None:
    for table in bench_tables(record):
        console.print(drawn(table))
    for mismatch in record["mismatches"][:5]:
        where = f"{mismatch['prompt']} turn {mismatch['turn']}, new token {mismatch['position']}"
        tie = f"the two best logits are {mismatch['gap']:.2g} apart, one step is {mismatch['step']:.2g}"
        console.print(f"{where}: {mismatch['other']} instead of {mismatch['plain']}; {tie}")
    interval = record["s_wall_ci95"]
    is_good = record["identical"] is not False and (interval is None or interval[0] > 1)
    console.print(Text(record["verdict"], style="bold green" if is_good else "bold red"))
