"""`paceline mask`: prints rows as the target would see them and marks what a draft is trained on.

It knows no rule about masks; `data.examples` decides, this file colours.
"""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli._base import Command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.data.examples import Example


def mask(
    file: Annotated[Path, typer.Argument(help="Rows: JSONL, also .gz or .xz.")],
    target: Annotated[str, typer.Option("--target", "-t", help="Target whose tokenizer and chat template are used.")],
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="Rows to print.")] = 3,
    max_length: Annotated[int, typer.Option(help="Tokens at which a row is cut, as in training.")] = 2048,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Thinking mode of the chat template, if it has one.")
    ] = None,
) -> None:
    """Show what is trained on: rows as the target sees them, the supervised tokens in green (without colour: {+ +})."""
    from rich.console import Console
    from rich.text import Text

    from paceline.cli._marks import Marks
    from paceline.data.chat import ChatFormat
    from paceline.data.examples import build_examples
    from paceline.data.rows import read_rows
    from paceline.store.hub import load_tokenizer

    console = Console(highlight=False, soft_wrap=True)
    reading = read_rows(file, limit=rows)
    for skip in reading.skips:
        console.print(Text(f"{skip.source}: skipped: {skip.reason}", style="yellow"))
    tokenizer = load_tokenizer(target)
    options = {} if thinking is None else {"enable_thinking": thinking}
    built = build_examples(reading.rows, chat=ChatFormat(tokenizer, options=options), max_length=max_length)
    for drop in built.drops:
        console.print(Text(f"{drop.source}: dropped: {drop.reason}", style="yellow"))
    for example in built.examples:
        head = f"{example.source}: {len(example.ids)} tokens, {example.num_supervised} trained on"
        console.print(Text(head, style="bold"))
        marks = Marks(console, rest="dim")
        pieces = [marks.piece(text, is_marked=flag) for text, flag in spans(example, tokenizer=tokenizer)]
        console.print(Text.assemble(*pieces, marks.end()))
    console.print(Text(f"{reading.summary()}; {built.summary()}", style="bold"))


def spans(example: "Example", *, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[str, bool]]:
    """(text, is trained on) of each run of tokens with equal mask, in order."""
    ids, flags = example.ids.tolist(), example.mask.tolist()  # sync
    edges = [0, *(index for index in range(1, len(flags)) if flags[index] != flags[index - 1]), len(flags)]
    return [(str(tokenizer.decode(ids[start:end])), flags[start]) for start, end in pairwise(edges)]


PLUGIN = Command(run=mask, group="Data", order=30)
