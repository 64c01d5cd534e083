"""One generation on a terminal: open by name, stream text as it is committed, close with one line of figures.

It knows consoles and no options; `generate` and `demo` share it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.decoding.binding import Draft
    from paceline.targets.generic import Target


def open_target_and_draft(
    target: str, draft: str, *, plan: str, dtype: str, device: str, compile_: str, threads: int | None
) -> "tuple[Target, Draft | None]":
    """Both, by name; what is wrong with draft or plan is refused before the target is loaded.

    plan: as it is spelled.  dtype, device: as in `load_target`.  compile_: auto or off.  threads: None leaves torch's
    choice.  Raises PacelineError.
    """
    from paceline.cli._opening import check_draft, open_draft
    from paceline.cli._plans import parse_plan
    from paceline.errors import ConfigError
    from paceline.machine import set_threads
    from paceline.store.hub import load_model, load_tokenizer
    from paceline.targets.generic import Target

    if compile_ not in ("auto", "off"):
        raise ConfigError(f"--compile: found '{compile_}', expected auto or off")
    parse_plan(plan)
    check_draft(draft)
    set_threads(threads, option="--threads")
    model = load_model(target, dtype=dtype, device=device)
    opened = Target(model, tokenizer=load_tokenizer(target), name=target, compile=compile_)
    return opened, open_draft(draft, target=opened)


def stream(
    console: Any,
    target: "Target",
    draft: "Draft | None",
    prompt: Any,
    *,
    plan: str,
    seed: int,
    options: Any,
    show: bool,
) -> None:  # fmt: skip
    """Print tokens as they are committed, then one line that says what happened.

    show: mark what the draft wrote.
    """
    import time

    from rich.text import Text

    from paceline.cli._marks import Marks
    from paceline.cli._plans import parse_plan
    from paceline.decoding.api import generate as decode
    from paceline.decoding.loop import Commit

    written: list[int] = []
    shown, marks = "", Marks(console)

    def on_commit(commit: Commit) -> None:
        nonlocal shown
        for token, is_drafts in zip(commit.tokens, commit.from_draft, strict=True):
            written.append(token)
            whole = target.tokenizer.decode(written, skip_special_tokens=True)
            if whole.endswith("\ufffd") and not commit.is_last:
                continue  # a character whose bytes are spread over several tokens
            console.print(marks.piece(whole[len(shown) :], is_marked=show and is_drafts), end="")
            shown = whole

    start = time.perf_counter()
    result = decode(target, prompt, draft=draft, plan=parse_plan(plan), seed=seed, on_commit=on_commit, **options)
    seconds = time.perf_counter() - start
    total = result.stats.total
    line = f"{len(written)} tokens in {seconds:.1f} s, {len(written) / seconds:.1f} tokens/s"
    if draft is not None and total.rounds:
        line += f"; {total.accepted} written by the draft, accepted length {total.accepted_length:.2f}"
    console.print(marks.end(), Text(f"\n\n{line}", style="dim"), sep="")
