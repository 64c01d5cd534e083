"""Three doors to one loop: `generate`, `generate_stream`, and `speculative` for people who stay in transformers.

All options are transformers' own generation options; each is honoured exactly or refused by name.  This module binds
options, rows and proposers together and knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.decoding import options as opt
from paceline.decoding.loop import Commit, DecodeLoop, RowState
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import LookupProposer, NoDraft, Proposer, SequentialProposer
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.decoding.stats import RunStats
from paceline.drafts._base import LookupDraft, SequentialDraft
from paceline.errors import ConfigError, UnsupportedOption
from paceline.ops.sampling import is_greedy
from paceline.targets.generic import Target

Draft = SequentialDraft | LookupDraft
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


@dataclass(slots=True)
class _Recorder:
    scores: list[Tensor]
    logits: list[Tensor]

    def __call__(self, logits: Tensor, scores: Tensor) -> None:
        self.logits.append(logits.to(torch.float32, copy=True))
        self.scores.append(scores.to(torch.float32, copy=True))


def make_proposer(draft: Draft | None, target: Target, *, plan: ProposalPlan, sampling: DraftSampling) -> Proposer:
    """The proposer that fits a draft; None decodes plainly."""
    if draft is None:
        return NoDraft()
    if isinstance(draft, SequentialDraft):
        if draft.vocab.target_size > target.vocab_size:
            raise ConfigError(
                f"the draft was made for a vocabulary of {draft.vocab.target_size} ids, the target has {target.vocab_size}"
            )
        return SequentialProposer(draft, target, plan, sampling)
    if plan.law == "sampled":
        raise UnsupportedOption("proposal law 'sampled' needs a draft that is a probability law; use 'ranked'")
    return LookupProposer(draft, plan)


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    draft: Draft | None = None,
    plan: ProposalPlan | None = None,
    seed: int = 0,
    on_commit: Callable[[Commit], None] | None = None,
    **options: Any,
) -> GenerationResult:
    """Decode prompts, with a draft or without; the tokens (greedy) or their law (sampling) are the target's.

    prompts: one prompt or several: text, token ids, or chat messages.  plan: what to propose (default: a chain of 5).
    seed: row i draws from seed + i, alone or in a batch.  on_commit: called with each round's tokens of each row.
    options: transformers' generation options (max_new_tokens, temperature, top_k, top_p, repetition_penalty, stop_strings,
    eos_token_id, logits_processor, output_scores, ...).  temperature below 1e-5 means greedy; sampling is chosen by a
    temperature above, or do_sample=True.  Raises UnsupportedOption, ConfigError, TargetError.
    """
    session = _Session(target, _as_prompts(prompts, target), draft, plan or ProposalPlan.chain(5), seed, dict(options))
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
    **options: Any,
) -> Iterator[Commit]:
    """One prompt, as an iterator of committed tokens with their writers; options as in `generate`."""
    session = _Session(target, [_ids(prompt, target)], draft, plan or ProposalPlan.chain(5), seed, dict(options))
    yield from session.run()


class _Session:
    """One call of `generate`: rows made from options, run once."""

    def __init__(
        self,
        target: Target,
        prompts: list[list[int]],
        draft: Draft | None,
        plan: ProposalPlan,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        self.target = target
        sampling = DraftSampling()
        options = _sampling_options(options)
        self.rows: list[RowState] = []
        for index, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=target.device)
            if "stop_strings" in options:
                options.setdefault("tokenizer", target.tokenizer)
            captured = opt.capture(target.model, ids, attention_mask=torch.ones_like(ids), options=options)
            sampling = opt.draft_sampling(captured.config)
            self.rows.append(make_row(index, prompt, captured, padding=[], seed=seed + index))
        self.loop = DecodeLoop(
            target, make_proposer(draft, target, plan=plan, sampling=sampling), scratch=plan.scratch
        )

    def run(self) -> Iterator[Commit]:
        """The rounds."""
        yield from self.loop.run(self.rows)

    def result(self) -> GenerationResult:
        """What was generated."""
        return GenerationResult([self._generation(row) for row in self.rows], self.loop.stats)

    def _generation(self, row: RowState) -> Generation:
        tokenizer = self.target.tokenizer
        text = tokenizer.decode(row.new_tokens, skip_special_tokens=True) if tokenizer is not None else ""
        record = row.record if isinstance(row.record, _Recorder) else None
        scores = torch.stack(record.scores) if record is not None and record.scores else None
        logits = torch.stack(record.logits) if record is not None and record.logits else None
        return Generation(row.ids[: row.prompt_length], row.new_tokens, text, row.from_draft, scores, logits)


def make_row(index: int, prompt: list[int], captured: opt.Captured, *, padding: list[int], seed: int) -> RowState:
    """A row's state from what transformers prepared for it."""
    config = captured.config
    device = captured.ids.device
    wants_record = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    return RowState(
        index=index,
        ids=list(prompt),
        prompt_length=len(prompt),
        max_new_tokens=int(config.max_length) - len(padding) - len(prompt),
        process=opt.row_process(captured.processors, padding=padding, device=device),
        is_stop=opt.row_stop(captured.criteria, padding=padding, device=device),
        dice=RowDice(seed),
        is_greedy=not config.do_sample,
        record=_Recorder([], []) if wants_record else None,
    )


def _sampling_options(options: dict[str, Any]) -> dict[str, Any]:
    """Temperature decides between greedy and sampling unless do_sample does; nothing is filtered unless asked for."""
    temperature = options.pop("temperature", None)
    if options.get("output_scores") or options.get("output_logits"):
        options["return_dict_in_generate"] = True
    explicit = options.pop("do_sample", None)
    if temperature is None:
        sample = bool(explicit)
    else:
        sample = not is_greedy(float(temperature)) and explicit is not False
    if not sample:
        for name in ("top_k", "top_p", "min_p", "typical_p"):
            options.pop(name, None)
        return {**options, "do_sample": False}
    options.setdefault("top_k", 0)
    return {**options, "do_sample": True, "temperature": 1.0 if temperature is None else float(temperature)}


def _as_prompts(prompts: Prompt | Sequence[Prompt], target: Target) -> list[list[int]]:
    if isinstance(prompts, str):
        return [_ids(prompts, target)]
    if len(prompts) == 0:
        raise ConfigError("no prompts were given; pass a text, token ids, chat messages, or a list of these")
    if isinstance(prompts[0], (int, dict)):
        return [_ids(prompts, target)]  # type: ignore[arg-type]
    return [_ids(prompt, target) for prompt in prompts]  # type: ignore[union-attr]


def _ids(prompt: Prompt, target: Target) -> list[int]:
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict)):
        if target.tokenizer is None:
            raise ConfigError("this target has no tokenizer; pass token ids")
        if isinstance(prompt, str):
            ids = list(target.tokenizer(prompt)["input_ids"])
        else:
            encoded = target.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
            ids = list(encoded["input_ids"])
    else:
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
    if not ids:
        raise ConfigError("an empty prompt cannot be continued; give at least one token")
    bad = [token for token in ids if not 0 <= token < target.vocab_size]
    if bad:
        raise ConfigError(f"token id {bad[0]} is not in the target's vocabulary of {target.vocab_size}")
    return ids


def speculative(draft: Draft | None, *, plan: ProposalPlan | None = None, taps_of: Target | None = None) -> Any:
    """A `custom_generate` for transformers: `model.generate(..., custom_generate=paceline.speculative(draft))`.

    Takes the batch as transformers gives it (left padding); sampling is seeded from torch's global generator, so that
    torch.manual_seed makes it repeatable.  Returns what `generate` returns: ids, or GenerateDecoderOnlyOutput.
    """
    from paceline.decoding.custom_generate import CustomGenerate

    return CustomGenerate(draft, plan or ProposalPlan.chain(5))
