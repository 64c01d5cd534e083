"""`paceline synth`: the target writes its own training data; a stopped run goes on where it was.

It shows progress and hands over to `data.synth_run`; how prompts and answers are made is decided there.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._base import MAX_SEED, Command
from paceline.cli._target_options import Device
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.data.answering import SynthOptions
    from paceline.data.prompt_sources import Source
    from paceline.targets.generic import Target

BYTES_PER_TOKEN = 6  # of a row on disk per answer token, prompt included; measured on smollm2


def synth(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to fill: rows.jsonl, dropped.jsonl, synth.json.")],
    target: Annotated[str, typer.Option("--target", "-t", help="Folder, Hub id or embedded target.")] = "smollm2",
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Stop at this many.")] = 1_000_000,
    seeds: Annotated[Path | None, typer.Option("--seeds", help="TOML of [[category]] tables; default: ours.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="FILE|hub:NAME",
            help="Answer these prompts instead of the target's own: JSONL, or a Hub set as hub:OWNER/NAME?split=.."
            "&column=.. (quote it); repeatable.",
        ),
    ] = None,
    sampled_share: Annotated[float, typer.Option("--sampled-share", min=0, max=1, help="Answers not greedy.")] = 0.25,
    answer_temperature: Annotated[float, typer.Option("--answer-temperature", min=0.01)] = 0.8,
    max_answer_tokens: Annotated[int, typer.Option("--max-answer-tokens", min=2)] = 224,
    max_prompt_tokens: Annotated[
        int,
        typer.Option(
            "--max-prompt-tokens", min=4, help="The target's own end there; longer ones of --prompts are left out."
        ),
    ] = 160,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Rows decoded at once.")] = 64,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 is several times faster where the CPU has it.")] = (
        "float32"
    ),
    device: Device = "cpu",
    seed: Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED)] = 0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
) -> None:
    """Let the target write prompts (after an opened user turn of its chat template), then its own answers.

    With --prompts it answers yours: the first user turn of each row, behind its system turn; later turns are not asked.
    It stops when they are used up, or at --answer-tokens; what is left out is named in dropped.jsonl.

    Run it again with the same options to go on after a stop; nothing that was written is lost.
    """
    from rich.console import Console

    from paceline.data.answering import SynthOptions
    from paceline.data.chat import ChatFormat, tokenizer_digest
    from paceline.data.prompt_sources import open_sources
    from paceline.machine import set_threads
    from paceline.store.figures import size_text
    from paceline.store.hub import load_target

    if prompts and seeds is not None:
        raise ConfigError("--seeds is for prompts that the target writes; leave it or --prompts out")
    console = Console(highlight=False, soft_wrap=True)
    set_threads(threads, option="--threads")
    options = SynthOptions(
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        sampled_share=sampled_share,
        answer_temperature=answer_temperature,
        slots=slots,
    )
    sources = open_sources(prompts) if prompts else None
    size = size_text(answer_tokens * BYTES_PER_TOKEN)
    console.print(f"{'at most ' if sources else ''}about {size} will be written to {out}")
    opened = load_target(target, dtype=dtype, device=device)
    fingerprint = {
        "target": target,
        "dtype": dtype,
        "tokenizer": tokenizer_digest(opened.tokenizer),
        "template": ChatFormat(opened.tokenizer).template_digest(),
    }
    _run(console, opened, out, options, answer_tokens, fingerprint, seeds, sources)


def _run(
    console: "Console", target: "Target", out: Path, options: "SynthOptions", answer_tokens: int,
    fingerprint: dict[str, Any], seeds: Path | None, prompts: "tuple[Source, ...] | None",
) -> None:  # fmt: skip
    """Write the rows and say what they are."""
    from paceline.cli._progress import Bar, interruptible
    from paceline.data.synth_run import SynthProgress, run_synth

    def kept() -> str:
        rows = out / "rows.jsonl"
        count = rows.read_bytes().count(b"\n") if rows.exists() else 0
        return f"{count} rows are kept in {out}; run the same command again to go on"

    with interruptible(kept), Bar(console, total=answer_tokens, text="answer tokens") as bar:

        def report(progress: SynthProgress) -> None:
            bar.update(progress.answer_tokens, f"{progress.rows} rows, {progress.rate:.0f} answer tokens/s")

        done = run_synth(
            target, folder=out, options=options, answer_tokens=answer_tokens, fingerprint=fingerprint, seeds=seeds,
            prompts=prompts, report=report,
        )  # fmt: skip
    share = ", ".join(f"{name or 'no category'} {count}" for name, count in done.by_category.most_common())
    console.print(f"{done.rows} rows, {done.answer_tokens} answer tokens ({share})")
    if done.dropped:
        left_out = ", ".join(f"{count} x {why}" for why, count in done.dropped.most_common())
        console.print(f"prompts dropped: {left_out}; {out}/dropped.jsonl names them")
    if prompts is not None:
        is_full = done.answer_tokens >= answer_tokens
        console.print(f"stopped at --answer-tokens {answer_tokens}" if is_full else "all prompts are used up")
    console.print(f"next: paceline mask {out}/rows.jsonl --target {fingerprint['target']}, then paceline train")


PLUGIN = Command(run=synth, group="Data", order=10)
