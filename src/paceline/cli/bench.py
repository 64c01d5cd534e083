"""`paceline bench`: plain and speculative decoding of the same prompts, interleaved, with every figure and its error.

It reads options only: `_bench_setup` opens what they name, `_bench_run` measures and prints.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import MAX_SEED, Command
from paceline.cli._target_options import Device, Dtype

DIFFERENT = 1  # exit code when float32 greedy outputs differ, which must never happen


def bench(
    target: Annotated[str, typer.Option("--target", "-t", help="Target: a name, a folder or a Hub id.")],
    draft: Annotated[str, typer.Option("--draft", "-d", help="Draft: its folder, ngram, or none for plain only.")],
    workload: Annotated[
        list[str],
        typer.Option(
            "--workload",
            "-w",
            metavar="FILE|hub:NAME",
            help="Prompts: JSONL, or a Hub set as hub:OWNER/NAME?split=..&column=.. (quote it); several may follow.",
        ),
    ],
    out: Annotated[
        list[Path], typer.Option("--out", "-o", metavar="FILE", help="The record; once, or once for each --plan.")
    ],
    more: Annotated[list[str] | None, typer.Argument(help="Further workloads.", metavar="FILE|hub:NAME")] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", "-p", metavar="PLAN", help="chain:5 (default) or tree:DEPTHxWIDTH:NODES; repeatable."),
    ] = None,
    prompts_per_file: Annotated[int, typer.Option(min=1, help="First prompts of each file or Hub set.")] = 40,
    turns: Annotated[
        str, typer.Option(help="first, or all: follow-ups too, after the target's own answers.")
    ] = "first",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy, and outputs are compared.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus; needs a temperature.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of sampling and of the bootstrap.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Prompts decoded first and not counted.")] = 2,
    baseline: Annotated[
        str, typer.Option(help="transformers' own, comma-separated: hf, prompt-lookup, hf-assisted.")
    ] = "",
    assistant: Annotated[
        str | None, typer.Option(help="Model for hf-assisted (default: the target's own first layers).")
    ] = None,
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a record that is there.")] = False,
) -> None:
    """Measure a draft: the same prompts plainly and with it, in one run, and whether it pays.

    Outputs are compared, every figure has a standard error over prompts, and the record names model, draft, prompts,
    options and machine. A stopped run goes on with --resume. Exit code 1: greedy float32 outputs differed.
    """
    from paceline.cli._bench_run import run_bench
    from paceline.cli._bench_setup import BenchOptions, DecoderOptions, PromptOptions, TargetOptions

    options = BenchOptions(
        target=TargetOptions(target, revision, dtype, device, compile, trust_remote_code),
        prompts=PromptOptions((*workload, *(more or ())), prompts_per_file, turns, thinking, tuple(template or ())),
        decoders=DecoderOptions(draft, tuple(plan or ()), baseline, assistant),
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, warmup=warmup, threads=threads,
        outs=tuple(out), plots=plots, resume=resume, force=force,
    )  # fmt: skip
    if run_bench(options):
        raise typer.Exit(DIFFERENT)


PLUGIN = Command(run=bench, group="Measure", order=10)
