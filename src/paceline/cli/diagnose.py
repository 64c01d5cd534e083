"""`paceline diagnose`: where a draft's proposals go wrong, several drafts side by side on the same prompts.

It reads options only; `_diagnose_run` opens what they name, measures and prints.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import MAX_SEED, Command
from paceline.cli._target_options import Device, Dtype


def diagnose(
    target: Annotated[str, typer.Option("--target", "-t", help="Target: a name, a folder or a Hub id.")],
    draft: Annotated[
        list[str],
        typer.Option("--draft", "-d", help="Draft folder; several stand side by side, the first is the base."),
    ],
    workload: Annotated[
        list[str],
        typer.Option(
            "--workload",
            "-w",
            metavar="FILE|hub:NAME",
            help="Prompts: JSONL, or a Hub set as hub:OWNER/NAME?split=..&column=.. (quote it); repeatable.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The record, JSON.")],
    plan: Annotated[
        str, typer.Option("--plan", "-p", metavar="PLAN", help="chain:5 or tree:DEPTHxWIDTH:NODES[:sampled].")
    ] = "tree:5x4:15",
    prompts_per_file: Annotated[int, typer.Option(min=1, help="First prompts of each file or Hub set.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus; needs a temperature.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of sampling and of the bootstrap.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice by default.")] = None,
    compile: Annotated[
        str, typer.Option("--compile", help="auto: the fast forward where it fits; off: eager.")
    ] = "auto",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    revision: Annotated[str | None, typer.Option(help="Of a Hub target.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that a Hub repository brings.")] = False,
    thinking: Annotated[bool | None, typer.Option(help="Thinking mode of the chat template, if it has one.")] = None,
    template: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the chat template; repeatable.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for pictures (PNG, SVG); needs matplotlib.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a record that is there.")] = False,
) -> None:
    """Decode a few prompts with a draft and look at every round: what was drafted, pruned, accepted and missed.

    Pruned share and coincidence of the draft's greedy path, acceptance by depth, why and at which rank the target left
    the proposal, calibration of the draft's confidence, its entropy. The tokens are those that `generate` writes.
    """
    from paceline.cli._bench_setup import PromptOptions, TargetOptions
    from paceline.cli._diagnose_run import DiagnoseOptions, run_diagnosis

    options = DiagnoseOptions(
        target=TargetOptions(target, revision, dtype, device, compile, trust_remote_code),
        prompts=PromptOptions(tuple(workload), prompts_per_file, "first", thinking, tuple(template or ())),
        drafts=tuple(draft), plan=plan, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
        threads=threads, out=out, plots=plots, force=force,
    )  # fmt: skip
    run_diagnosis(options)


PLUGIN = Command(run=diagnose, group="Measure", order=20)
