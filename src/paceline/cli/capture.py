"""`paceline capture`: store the target's states for a recipe's rows, so that training need not run the target."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def capture(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a TOML file.", metavar="RECIPE.toml")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the features; name it in data.features.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Change the recipe: section.field=value.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 (half the disk).")] = "bfloat16",
    max_disk: Annotated[
        str | None, typer.Option("--max-disk", help="Stop cleanly before the folder exceeds this, for example 5MB.")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Print the size that is needed, and leave.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
) -> None:
    """Store the target's states for the training and validation rows of a recipe.

    Prints the size first. Every shard carries a checksum; the folder a fingerprint of target, tokenizer, template and
    taps. Run it again to go on after a stop.
    """
    from rich.console import Console

    from paceline.cli._progress import Bar, interruptible
    from paceline.config import load_recipe
    from paceline.machine import set_threads
    from paceline.training.capture import CaptureProgress
    from paceline.training.capture_run import plan_capture, run_capture

    settings = load_recipe(recipe, overrides=changes or [])
    cap = None if max_disk is None else parse_size(max_disk)
    set_threads(threads, option="--threads")
    console = Console(highlight=False, soft_wrap=True)
    plan = plan_capture(settings, dtype=dtype, say=console.print)
    if estimate:
        return
    tokens = sum(len(example.ids) for example in plan.examples)
    kept = f"what was captured is kept in {out}; run the same command again to go on"
    with interruptible(lambda: kept), Bar(console, total=tokens, text="tokens") as bar:

        def report(now: CaptureProgress) -> None:
            rate = now.new_tokens / max(now.seconds, 1e-9)
            bar.update(now.old_tokens + now.new_tokens, f"{now.done} of {now.total} examples, {rate:,.0f} tokens/s")

        done = run_capture(plan, folder=out, max_disk=cap, say=console.print, report=report)
    console.print(f"{done.done} of {done.total} examples in {out}, {done.new_tokens} tokens in {done.seconds:.0f} s")
    if done.is_full:
        console.print(f"stopped at --max-disk {max_disk}: run again with more room to go on", style="yellow")
        raise typer.Exit(1)
    use = shlex.join(["paceline", "train", str(recipe), "--out", "run", "--set", f"data.features={out}"])
    console.print(f"next: {use}", markup=False)


def parse_size(text: str) -> int:
    """Bytes of '5MB', '1.5 GB' or '4096'.  Raises ConfigError."""
    import math

    from paceline.errors import ConfigError

    number = text.strip().upper().rstrip("BKMGT").strip()
    unit = text.strip().upper()[len(number) :].strip()
    try:
        size = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(f"--max-disk: found '{text}', expected a size such as 500MB or 2GB")
    return int(size)


PLUGIN = Command(run=capture, group="Data", order=40)
