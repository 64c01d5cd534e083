"""Our own doors to the loop: `generate` and `generate_stream`, for text, token ids and chat messages.

All options are transformers' own generation options; each is honoured exactly or refused by name.  This module knows
no arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, Unpack, cast

import torch
from torch import Tensor

from paceline.decoding import options as opt
from paceline.decoding.binding import Draft, make_loop, make_row
from paceline.decoding.loop import Commit, RowState
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.stats import RunStats
from paceline.drafts._base import LookupDraft, SequentialDraft
from paceline.errors import ConfigError
from paceline.targets.generic import Target

EXPECTED = "expected a text, token ids, or chat messages"
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


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
    draft: Draft | None = None,
    plan: ProposalPlan | None = None,
    seed: int = 0,
    on_commit: Callable[[Commit], None] | None = None,
    **options: Unpack[opt.GenerationOptions],
) -> GenerationResult:
    """Decode prompts, with a draft or without; the tokens (greedy) or their law (sampling) are the target's.

    prompts: one prompt or several: text, token ids, or chat messages.  plan: what to propose (default: a chain of 5).
    seed: row i draws from seed + i, alone or in a batch.  on_commit: called with each round's tokens of each row.
    options: transformers' generation options (max_new_tokens, temperature, top_k, top_p, repetition_penalty,
    stop_strings, eos_token_id, logits_processor, output_scores, ...).  temperature below 1e-5 means greedy; sampling is
    chosen by a temperature above, or do_sample=True.  Raises UnsupportedOption, ConfigError, TargetError.
    """
    session = _Session(target, _as_prompts(prompts, target), draft, plan or ProposalPlan.chain(5), seed, options)
    for commit in session.run():
        if on_commit is not None:
            on_commit(commit)
    return session.result()


def generate_stream(
    target: Target,
    prompt: Prompt,
    *,
    draft: Draft | None = None,
    plan: ProposalPlan | None = None,
    seed: int = 0,
    **options: Unpack[opt.GenerationOptions],
) -> Iterator[Commit]:
    """One prompt, as an iterator of committed tokens with their writers; options as in `generate`.

    Options are checked by this call, before the first token is asked for.
    """
    return _Session(target, [_ids(prompt, target)], draft, plan or ProposalPlan.chain(5), seed, options).run()


class _Session:
    """One call of `generate`: rows made from options, run once."""

    def __init__(
        self,
        target: Target,
        prompts: list[list[int]],
        draft: Draft | None,
        plan: ProposalPlan,
        seed: int,
        options: opt.GenerationOptions,
    ) -> None:
        _refuse_types(target, draft, plan)
        opt.refuse_unknown(options)
        options = opt.with_sampling(opt.with_stop_strings(options, model=target.model, tokenizer=target.tokenizer))
        self.target = target
        calls = [
            opt.capture(target.model, torch.tensor([ids], device=target.device), options=_for_prompt(options, index))
            for index, ids in enumerate(prompts)
        ]
        places = [(captured, row) for captured in calls for row in range(len(captured.ids))]
        self.rows: list[RowState] = [
            make_row(captured, row=row, index=index, padding=0, seed=seed + index)
            for index, (captured, row) in enumerate(places)
        ]
        self.loop = make_loop(draft, target, plan=plan, captured=calls[0])

    def run(self) -> Iterator[Commit]:
        """The rounds."""
        return self.loop.run(self.rows)

    def result(self) -> GenerationResult:
        """What was generated."""
        return GenerationResult([self._generation(row) for row in self.rows], self.loop.stats)

    def _generation(self, row: RowState) -> Generation:
        tokenizer, record = self.target.tokenizer, row.record
        text = tokenizer.decode(row.new_tokens, skip_special_tokens=True) if tokenizer is not None else ""
        scores = torch.stack(record.scores) if record is not None else None
        logits = torch.stack(record.logits) if record is not None else None
        return Generation(row.ids[: row.prompt_length], row.new_tokens, text, row.from_draft, scores, logits)


def _refuse_types(target: object, draft: object, plan: object) -> None:
    """Names and models are easily handed over where our own objects are expected."""
    if not isinstance(target, Target):
        raise ConfigError(f"target is a {type(target).__name__}; expected a paceline.Target, as load_target returns it")
    if draft is not None and (isinstance(draft, str) or not isinstance(draft, SequentialDraft | LookupDraft)):
        raise ConfigError(f"draft is a {type(draft).__name__}; expected the draft of what load_draft returns, or None")
    if not isinstance(plan, ProposalPlan):
        raise ConfigError(f"plan is a {type(plan).__name__}; expected a ProposalPlan, such as ProposalPlan.chain(5)")


def _for_prompt(options: opt.GenerationOptions, index: int) -> opt.GenerationOptions:
    """Each prompt is prepared alone; a function of the place in the batch must still be told its place."""
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is None:
        return options
    return {**options, "prefix_allowed_tokens_fn": lambda _row, ids: allowed(index, ids)}


def _as_prompts(prompts: object, target: Target) -> list[list[int]]:
    """Ids of each prompt; one prompt alone is a text, a list of ids, or a list of messages."""
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()  # sync
    if isinstance(prompts, str):
        return [_ids(prompts, target)]
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is a {type(prompts).__name__}; {EXPECTED}, or a list of these")
    several = cast("Sequence[object]", prompts)
    if len(several) == 0:
        raise ConfigError(f"no prompts were given; {EXPECTED}, or a list of these")
    if isinstance(several[0], (str, Sequence, Tensor)):
        return [_ids(prompt, target) for prompt in several]
    return [_ids(several, target)]


def _ids(prompt: object, target: Target) -> list[int]:
    """Ids of one prompt.  Raises ConfigError."""
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()  # sync
    if not isinstance(prompt, Sequence):
        raise ConfigError(f"a prompt is a {type(prompt).__name__}; {EXPECTED}")
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict)):
        if target.tokenizer is None:
            raise ConfigError("this target has no tokenizer; pass token ids")
        if isinstance(prompt, str):
            ids = list(target.tokenizer(prompt)["input_ids"])
        else:
            encoded = target.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
            ids = list(encoded["input_ids"])
    else:
        ids = [_id(token) for token in cast("Sequence[object]", prompt)]
    if not ids:
        raise ConfigError("an empty prompt cannot be continued; give at least one token")
    bad = [token for token in ids if not 0 <= token < target.vocab_size]
    if bad:
        raise ConfigError(f"token id {bad[0]} is not in the target's vocabulary of {target.vocab_size}")
    return ids


def _id(token: object) -> int:
    try:
        return operator.index(cast("SupportsIndex", token))
    except TypeError:
        raise ConfigError(f"a prompt holds {token!r}, a {type(token).__name__}; {EXPECTED}") from None
