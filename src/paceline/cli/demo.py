"""`paceline demo`: the whole way on one real model in under ten minutes: decode both ways, compare, train a little.

It runs the other commands with small numbers and prints each before it runs, so that it can be repeated by hand.
"""

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._base import Command

if TYPE_CHECKING:
    from rich.console import Console

TARGET, DRAFT, PLAN = "smollm2@wheel", "smollm2-eagle3", "tree:3x3:5"
NEW_TOKENS = 96
ROWS_TOKENS = 2500  # answer tokens that the target writes for the training part: about a minute on two cores
STEPS = 60  # about two minutes on two cores
MEASURED = "measured.json"  # beside the draft: what `paceline results` took over from the record of its benchmark
NEXT = (
    f"paceline synth --target {TARGET} --out rows --answer-tokens 1000000 --dtype bfloat16",
    "paceline train recipes/smollm2-eagle3.toml --out run --set 'data.train=[\"rows/rows.jsonl\"]'",
    f"paceline bench --target {TARGET} --draft run/best --plan {PLAN} --workload PROMPTS.jsonl --out record.json",
)


def demo(
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Prompts to decode both ways.")] = 8,
    training: Annotated[bool, typer.Option("--training/--no-training", help="Also train a tiny draft.")] = True,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder to keep everything in; default: a temporary one.")
    ] = None,
) -> None:
    """Fetch SmolLM2-135M-Instruct, decode prompts with and without the draft that comes with Paceline, and compare.

    Then the target writes a few training rows and a tiny draft is trained on them for about two minutes. Record, rows
    and draft are kept in a folder that is named at the end.
    """
    from rich.console import Console

    from paceline.cli._outputs import check_new_folder
    from paceline.machine import check_threads
    from paceline.shipped import demo_prompts
    from paceline.store.figures import size_text

    check_threads(threads, option="--threads")
    if out is not None:
        check_new_folder(out)
    console = Console(highlight=False, soft_wrap=True)
    common = ["--target", TARGET, "--threads", str(threads)]
    drafted = ["--draft", DRAFT, "--plan", PLAN, "--max-new-tokens", str(NEW_TOKENS)]
    _title(console, "1. A real target")
    _run(console, ["fetch", "smollm2", "--source", "wheel"])
    folder = _folder(out)
    _title(console, "2. The same prompts with and without a draft: the same tokens, how much faster?")
    workload = ["--workload", str(demo_prompts()), "--prompts-per-file", str(prompts)]
    _run(console, ["bench", *common, *drafted, *workload, "--out", str(folder / "demo.json")])
    _compare(console, folder / "demo.json")
    _title(console, "3. One answer; what the draft wrote is green, or in {+ +}")
    _run(console, ["generate", "List five ways to save energy at home.", *common, *drafted, "--show-draft"])
    if training:
        _title(console, "4. Training: the target writes rows, then a tiny draft learns from them")
        _train(console, folder, common, threads=threads)
    _title(console, "What a real run needs: the same commands and hours instead of minutes")
    for command in NEXT:
        console.print(command, markup=False)
    console.print('(recipes/ is in the repository; PROMPTS.jsonl holds {"prompt": "..."}, one a line)', markup=False)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    console.print(f"\nKept: {folder}, {size_text(size)}; remove the folder when you are done", markup=False)


def _folder(out: Path | None) -> Path:
    """The folder of this demo, which is not removed: what is printed points into it."""
    if out is None:
        return Path(tempfile.mkdtemp(prefix="paceline-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    return out


def _compare(console: "Console", record: Path) -> None:
    """What was just measured beside what was recorded with this draft: few prompts leave a wide interval."""
    from paceline.measure.excerpt import figures_line
    from paceline.shipped import shipped_drafts

    recorded = json.loads((shipped_drafts()[DRAFT] / MEASURED).read_text("utf-8"))
    where = f"{recorded['threads']} threads of {recorded['device_name']}"
    console.print(f"here:     {figures_line(json.loads(record.read_text('utf-8')))}")
    console.print(f"recorded: {figures_line(recorded)}; {where}")


def _train(console: "Console", folder: Path, common: Sequence[str], *, threads: int) -> None:
    from paceline.toml import to_toml

    limits = ["--answer-tokens", str(ROWS_TOKENS), "--max-answer-tokens", "96", "--slots", "16"]
    _run(console, ["synth", "--out", str(folder / "rows"), *common, *limits])
    recipe = folder / "tiny.toml"
    recipe.write_text(to_toml(_recipe(folder / "rows" / "rows.jsonl", threads=threads)), "utf-8")
    _run(console, ["train", str(recipe), "--out", str(folder / "run")])
    console.print("The loss falls and the accepted length begins to rise; a useful draft has seen far more rows.")


def _run(console: "Console", arguments: list[str]) -> None:
    """Print a command, run it here, and stop the demo where it fails."""
    from paceline.cli.__main__ import INTERRUPTED, run

    console.print(f"$ paceline {shlex.join(arguments)}", style="dim", markup=False)
    code = run(arguments)
    if code == INTERRUPTED:
        raise SystemExit(code)  # it has said so; typer would let the demo say it again
    if code:
        raise typer.Exit(code)


def _title(console: "Console", text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _recipe(rows: Path, *, threads: int) -> dict[str, Any]:
    """The recipe of the training part, as a table: TOML quotes whatever stands in the path."""
    return {
        "target": {"name": TARGET},
        "draft": {"name": "eagle3", "vocab_size": 2048, "options": {"intermediate_size": 512}},
        "data": {"train": [rows.as_posix()], "max_length": 320},
        "objective": {"name": "ttt", "options": {"steps": 3}},
        "training": {
            "steps": STEPS,
            "tokens_per_batch": 1024,
            "optimizer": "muon",
            "learning_rate": 2e-3,
            "warmup_steps": 5,
            "threads": threads,
            "validate_every": 20,
            "save_every": STEPS,
            "log_every": 10,
        },
        "validation": {"prompts": 4, "depth": 3},
    }


PLUGIN = Command(run=demo, group="Start here", order=20)
