"""`paceline generate`: one prompt, streamed; with --show-draft the tokens that the draft wrote stand out.

It turns options into a call; it decides nothing about decoding, and `_generation` shows what comes.
"""

from typing import Annotated, Any

import typer

from paceline.cli._base import MAX_SEED, Command
from paceline.cli._target_options import Device, Dtype


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
    seed: Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED)] = 0,
    show_draft: Annotated[
        bool, typer.Option("--show-draft", help="Green, or between {+ +}: what the draft wrote.")
    ] = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    compile_: Annotated[
        str, typer.Option("--compile", help="auto: the fast CPU forward where it fits; off: eager.")
    ] = ("auto"),
) -> None:
    """Decode one prompt and stream the answer; a draft changes the speed and not one token."""
    from rich.console import Console

    from paceline.cli._generation import open_target_and_draft, stream

    console = Console(highlight=False, soft_wrap=True)
    text = _text(prompt)
    opened, drafting = open_target_and_draft(
        target, draft, plan=plan, dtype=dtype, device=device, compile_=compile_, threads=threads
    )
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if temperature > 0:
        options |= {"top_k": top_k, "top_p": top_p}
    if repetition_penalty != 1.0:
        options["repetition_penalty"] = repetition_penalty
    if stop:
        options["stop_strings"] = stop
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    stream(console, opened, drafting, text if raw else messages, plan=plan, seed=seed, options=options, show=show_draft)


def _text(prompt: str) -> str:
    """The prompt, or what standard input holds for `-`.  Raises ConfigError for bytes that are no text."""
    import sys

    from paceline.errors import ConfigError

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")  # where Python lets bytes that it cannot read through, it keeps them as lone surrogates
    except UnicodeError:
        source, encoding = ("standard input", sys.stdin.encoding) if prompt == "-" else ("PROMPT", "utf-8")
        raise ConfigError(f"{source} is not text in {encoding}; expected {encoding}, such as from iconv") from None
    return text


PLUGIN = Command(run=generate, group="Use", order=10)
