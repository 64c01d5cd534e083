"""The door for people who stay in transformers: a callable for `model.generate(..., custom_generate=...)`.

It translates a left-padded batch and prepared options into rows, and rows back into what `generate` returns; processors
and criteria see each row with the pads that transformers keeps before it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paceline.decoding import options as opt
from paceline.decoding.binding import AnyDraft, Draft, as_draft, as_plan, make_loop, make_row
from paceline.decoding.loop import RowState
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.stats import RunStats
from paceline.errors import UnsupportedOption
from paceline.targets import _transformers as tf
from paceline.targets.generic import Target


def speculative(draft: AnyDraft | None, *, plan: ProposalPlan | None = None) -> CustomGenerate:
    """A `custom_generate` for transformers: `model.generate(..., custom_generate=paceline.speculative(draft))`.

    Takes the batch as transformers gives it (left padding); sampling is seeded from torch's global generator, so that
    torch.manual_seed makes it repeatable.  Returns what `generate` returns: ids, or GenerateDecoderOnlyOutput, whose
    scores of a row that has ended are 0.  draft: what `load_draft` returns, or a draft; None decodes plainly.
    plan: what to propose (a chain of 5).  Raises ConfigError for anything else.
    """
    return CustomGenerate(as_draft(draft), as_plan(plan))


class CustomGenerate:
    """Holds a draft and a plan, and the target of the latest model it was called with.

    stats: the counts of the latest call.
    """

    def __init__(self, draft: Draft | None, plan: ProposalPlan) -> None:
        self.draft, self.plan = draft, plan
        self.stats = RunStats()
        self._target: Target | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        """What `generate` asks a custom method for, to learn its arguments; the tokenizer is saved on this occasion."""
        tf.keep_tokenizer()
        return inspect.signature(self.__call__)

    def __call__(
        self, model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, synced_gpus: bool = False,
        streamer: Any = None, tokenizer: Any = None, **arguments: Any,
    ) -> Any:  # fmt: skip
        """Decode as transformers asks; see `speculative`.

        tokenizer: named so that `generate` uses it for `stop_strings`, which arrive as a stopping criterion.
        """
        streamer = tf.lost_argument("streamer") if streamer is None else streamer
        assistant = tf.lost_argument("assistant_model")
        synced_gpus = synced_gpus or bool(tf.lost_argument("synced_gpus"))
        mask = arguments.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        captured = opt.Captured(input_ids, mask, logits_processor, stopping_criteria, generation_config)
        opt.refuse_unknown({"assistant_model": assistant, "synced_gpus": synced_gpus})  # type: ignore[typeddict-item]
        opt.refuse_unsupported(captured, arguments)
        _refuse_batch(captured, has_streamer=streamer is not None)
        padding = _padding(mask)
        rows = [
            make_row(captured, row=row, index=row, padding=pads, seed=_fresh_seed(generation_config))
            for row, pads in enumerate(padding)
        ]
        if self._target is None or self._target.model is not model:
            self._target = Target(model)
        loop = make_loop(self.draft, self._target, plan=self.plan, captured=captured)
        for commit in loop.run(rows):
            if streamer is not None:
                for token in commit.tokens:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        self.stats = loop.stats
        return _output(rows, captured)


def _fresh_seed(config: GenerationConfig) -> int:
    """The next seed from torch's global generator, which greedy decoding leaves untouched."""
    return int(torch.randint(2**62, (), generator=torch.default_generator)) if config.do_sample else 0


def _refuse_batch(captured: opt.Captured, *, has_streamer: bool) -> None:
    if len(captured.ids) == 1:
        return
    if has_streamer:
        raise UnsupportedOption("streamer: only one prompt at a time can be streamed, as in transformers")
    ends, _longest, others = tf.split_criteria(captured.criteria)
    if others and not ends:
        raise UnsupportedOption(
            f"{type(others[0]).__name__} without an eos_token_id in a batch: transformers would go on with rows that "
            "have ended; give eos_token_id and pad_token_id, or decode one prompt at a time"
        )


def _padding(mask: Tensor) -> list[int]:
    """Pads before each row.  mask: [B, T], 1 for real tokens."""
    pads = [row.index(1) if 1 in row else len(row) for row in mask.tolist()]  # sync
    for index, (row, first) in enumerate(zip(mask.tolist(), pads, strict=True)):
        if 0 in row[first:] or first == len(row):
            raise UnsupportedOption(f"attention_mask: row {index} is not left-padded; pad on the left")
    return pads


def _output(rows: list[RowState], captured: opt.Captured) -> Any:
    config, pad = captured.config, captured.pad_token
    longest = max(len(row.new_tokens) for row in rows)
    tail = torch.full((len(rows), longest), 0 if pad is None else pad, dtype=torch.int64)
    for index, row in enumerate(rows):
        tail[index, : len(row.new_tokens)] = torch.tensor(row.new_tokens, dtype=torch.int64)
    sequences = torch.cat([captured.ids, tail.to(captured.ids.device)], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    records = [row.record for row in rows if row.record is not None]
    scores = _by_step([record.scores for record in records], longest) if config.output_scores else None
    logits = _by_step([record.logits for record in records], longest) if config.output_logits else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)  # type: ignore[arg-type]


def _by_step(recorded: list[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """Per step [B, V]; a row that has ended holds zeros, since no token was chosen there."""
    blank = torch.zeros_like(recorded[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in recorded]) for step in range(longest))
