"""`paceline generate`: one prompt, streamed; with --show-draft the tokens that the draft wrote stand out.

It turns options into a call and tokens into text on a terminal; it decides nothing about decoding.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._base import Command

if TYPE_CHECKING:
    from paceline.decoding.api import Draft
    from paceline.targets.generic import Target

DRAFT_STYLE = "bold green"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the target; - reads it from standard input.")],
    target: Annotated[str, typer.Option("--target", "-t", help="Folder, Hub id or embedded target.")] = "smollm2",
    draft: Annotated[str, typer.Option("--draft", "-d", help="Draft folder, or ngram; none decodes plainly.")] = "none",
    plan: Annotated[str, typer.Option("--plan", help="chain:LENGTH or tree:DEPTHxWIDTH:NODES[:sampled].")] = "chain:5",
    system: Annotated[str | None, typer.Option("--system", help="System message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", min=0.01)] = 1.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given several times.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    show_draft: Annotated[bool, typer.Option("--show-draft", help="Colour the tokens that the draft wrote.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    compile_: Annotated[str, typer.Option("--compile", help="auto: the fast CPU forward where it fits; off: eager.")] = (
        "auto"
    ),
) -> None:
    """Decode one prompt and stream the answer; a draft changes the speed and not one token."""
    import sys

    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    opened, drafting = _open(target, draft, compile_=compile_, threads=threads)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if temperature > 0:
        options |= {"top_k": top_k, "top_p": top_p}
    if repetition_penalty != 1.0:
        options["repetition_penalty"] = repetition_penalty
    if stop:
        options["stop_strings"] = stop
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    _stream(console, opened, drafting, text if raw else messages, plan=plan, seed=seed, options=options, show=show_draft)


def _open(target: str, draft: str, *, compile_: str, threads: int | None) -> "tuple[Target, Draft | None]":
    import torch

    from paceline.cli._opening import open_draft
    from paceline.errors import ConfigError
    from paceline.store.hub import load_model, load_tokenizer
    from paceline.targets.generic import Target

    if compile_ not in ("auto", "off"):
        raise ConfigError(f"--compile: found '{compile_}', expected auto or off")
    if threads is not None:
        torch.set_num_threads(threads)
    opened = Target(load_model(target), tokenizer=load_tokenizer(target), name=target, compile=compile_)
    return opened, open_draft(draft, target=opened)


def _stream(
    console: Any, target: "Target", draft: "Draft | None", prompt: Any, *, plan: str, seed: int, options: Any, show: bool
) -> None:
    """Print tokens as they are committed, then one line that says what happened."""
    import time

    from rich.text import Text

    from paceline.cli._plans import parse_plan
    from paceline.decoding.api import generate as decode
    from paceline.decoding.loop import Commit

    written: list[int] = []
    shown = ""

    def on_commit(commit: Commit) -> None:
        nonlocal shown
        for token, is_drafts in zip(commit.tokens, commit.from_draft, strict=True):
            written.append(token)
            whole = target.tokenizer.decode(written, skip_special_tokens=True)
            if whole.endswith("\ufffd") and not commit.is_last:
                continue  # a character whose bytes are spread over several tokens
            console.print(Text(whole[len(shown) :], style=DRAFT_STYLE if show and is_drafts else ""), end="")
            shown = whole

    start = time.perf_counter()
    result = decode(target, prompt, draft=draft, plan=parse_plan(plan), seed=seed, on_commit=on_commit, **options)
    seconds = time.perf_counter() - start
    total = result.stats.total
    line = f"{len(written)} tokens in {seconds:.1f} s, {len(written) / seconds:.1f} tokens/s"
    if draft is not None and total.rounds:
        line += f"; {total.accepted} written by the draft, accepted length {total.accepted_length:.2f}"
    console.print(Text(f"\n\n{line}", style="dim"))


PLUGIN = Command(run=generate, group="Use", order=10)
