"""Our own doors to the loop: `generate` and `generate_stream`, for text, token ids and chat messages.

All options are transformers' own generation options; each is honoured exactly or refused by name.  This module knows
no arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from paceline.decoding import options as opt
from paceline.decoding.binding import AnyDraft, as_draft, as_plan, make_loop, make_row
from paceline.decoding.loop import Commit, RowState
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.prompts import Prompt, PromptIds, read_prompt, read_prompts
from paceline.decoding.stats import RunStats
from paceline.errors import ConfigError
from paceline.targets import _transformers as tf
from paceline.targets.generic import Target

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Generation:
    """One row's result.

    tokens: new token ids.  text: their text, special tokens left out ("" without a tokenizer).
    from_draft: per token, whether the draft wrote it.  scores, logits: [len(tokens), V] if asked for, else None.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    from_draft: list[bool]
    scores: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """All rows of a call, in the order of the prompts, and what happened."""

    rows: list[Generation]
    stats: RunStats


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    draft: AnyDraft | None = None,
    plan: ProposalPlan | None = None,
    seed: int = 0,
    on_commit: Callable[[Commit], None] | None = None,
    **options: Unpack[opt.GenerationOptions],
) -> GenerationResult:
    """Decode prompts, with a draft or without; the tokens (greedy) or their law (sampling) are the target's.

    prompts: one prompt or several: a text, which is continued as it is, without the chat template; chat messages
    (`[{"role": "user", "content": ...}]`), which go through it; or token ids.
    draft: what `load_draft` returns, or a draft.  plan: what to propose (default: a chain of 5).
    seed: row i draws from seed + i, alone or in a batch.  on_commit: called with each round's tokens of each row.
    options: transformers' generation options (max_new_tokens, temperature, top_k, top_p, repetition_penalty,
    stop_strings, eos_token_id, logits_processor, output_scores, ...).  temperature below 1e-5 means greedy; sampling is
    chosen by a temperature above, or do_sample=True.  Raises UnsupportedOption, ConfigError, TargetError.
    """
    _refuse_kinds(target, seed=seed, on_commit=on_commit)
    session = _Session(target, read_prompts(prompts, target), draft, plan, seed, options)
    for commit in session.run():
        if on_commit is not None:
            on_commit(commit)
    return session.result()


def generate_stream(
    target: Target,
    prompt: Prompt,
    *,
    draft: AnyDraft | None = None,
    plan: ProposalPlan | None = None,
    seed: int = 0,
    **options: Unpack[opt.GenerationOptions],
) -> Iterator[Commit]:
    """One prompt, as an iterator of committed tokens with their writers; prompt, draft and options as in `generate`.

    Options are checked by this call, before the first token is asked for.
    """
    _refuse_kinds(target, seed=seed, on_commit=None)
    return _Session(target, [read_prompt(prompt, target)], draft, plan, seed, options).run()


class _Session:
    """One call of `generate`: rows made from options, run once."""

    def __init__(
        self,
        target: Target,
        prompts: list[PromptIds],
        draft: AnyDraft | None,
        plan: ProposalPlan | None,
        seed: int,
        options: opt.GenerationOptions,
    ) -> None:
        draft, plan = as_draft(draft), as_plan(plan)
        opt.refuse_unknown(options)
        options = opt.with_sampling(opt.with_stop_strings(options, model=target.model, tokenizer=target.tokenizer))
        self.target = target
        calls = [
            opt.capture(
                target.model, torch.tensor([prompt.ids], device=target.device), options=_for_prompt(options, index)
            )
            for index, prompt in enumerate(prompts)
        ]
        places = [(called, row) for called in zip(prompts, calls, strict=True) for row in range(len(called[1].ids))]
        self._bare = {index for index, ((prompt, _), _) in enumerate(places) if prompt.is_bare}
        self._ends = tf.split_criteria(calls[0].criteria)[0]
        self.rows: list[RowState] = [
            make_row(captured, row=row, index=index, padding=0, seed=seed + index)
            for index, ((_, captured), row) in enumerate(places)
        ]
        self.loop = make_loop(draft, target, plan=plan, captured=calls[0])

    def run(self) -> Iterator[Commit]:
        """The rounds."""
        for commit in self.loop.run(self.rows):
            if commit.is_last and commit.row in self._bare:
                self._warn_if_empty(self.rows[commit.row])
            yield commit

    def _warn_if_empty(self, row: RowState) -> None:
        """Once a call: a chat target often ends a text without its template at once, which looks like a fault."""
        text = self.target.tokenizer.decode(row.new_tokens, skip_special_tokens=True)
        if row.new_tokens[-1] in self._ends and not text.strip():
            self._bare.clear()
            _LOG.warning(
                "%s ended a text at once: a text is continued as it is, without the chat template; for an answer pass "
                "messages: [{'role': 'user', 'content': ...}]", self.target.name,
            )  # fmt: skip

    def result(self) -> GenerationResult:
        """What was generated."""
        return GenerationResult([self._generation(row) for row in self.rows], self.loop.stats)

    def _generation(self, row: RowState) -> Generation:
        tokenizer, record = self.target.tokenizer, row.record
        text = tokenizer.decode(row.new_tokens, skip_special_tokens=True) if tokenizer is not None else ""
        scores = torch.stack(record.scores) if record is not None else None
        logits = torch.stack(record.logits) if record is not None else None
        return Generation(row.ids[: row.prompt_length], row.new_tokens, text, row.from_draft, scores, logits)


def _refuse_kinds(target: object, *, seed: object, on_commit: object) -> None:
    """Names and models are easily handed over where our own objects are expected."""
    if not isinstance(target, Target):
        raise ConfigError(
            f"target is a {type(target).__name__}; expected a paceline.Target: paceline.load_target(name) returns one, "
            "paceline.Target(model, tokenizer=tokenizer) makes one of a model of transformers"
        )
    if not isinstance(seed, int):
        raise ConfigError(f"seed is {seed!r}; expected a whole number")
    if on_commit is not None and not callable(on_commit):
        raise ConfigError(f"on_commit is a {type(on_commit).__name__}; expected a function of a Commit")


def _for_prompt(options: opt.GenerationOptions, index: int) -> opt.GenerationOptions:
    """Each prompt is prepared alone; a function of the place in the batch must still be told its place."""
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is None:
        return options
    return {**options, "prefix_allowed_tokens_fn": lambda _row, ids: allowed(index, ids)}
