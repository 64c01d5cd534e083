"""The door for people who stay in transformers: a callable for `model.generate(..., custom_generate=...)`.

It translates a left-padded batch and prepared options into rows, and rows back into what `generate` returns; processors
and criteria see each row with the pads that transformers keeps before it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paceline.decoding import options as opt
from paceline.decoding.api import Draft, make_proposer, make_row
from paceline.decoding.loop import DecodeLoop, RowState
from paceline.decoding.plan import ProposalPlan
from paceline.errors import UnsupportedOption
from paceline.targets.generic import Target


class CustomGenerate:
    """Holds a draft and a plan; wraps each model it is called with once.

    stats: the counts of the latest call.
    """

    def __init__(self, draft: Draft | None, plan: ProposalPlan) -> None:
        self.draft, self.plan = draft, plan
        self.stats: Any = None
        self._targets: WeakKeyDictionary[Any, Target] = WeakKeyDictionary()

    def __call__(
        self, model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, synced_gpus: bool = False,
        streamer: Any = None, **arguments: Any,
    ) -> Any:  # fmt: skip
        """Decode as transformers asks; see `speculative`."""
        batch = len(input_ids)
        if synced_gpus:
            raise UnsupportedOption("synced_gpus=True: a sharded target is not supported by speculative decoding here")
        if streamer is not None and batch > 1:
            raise UnsupportedOption("streamer: only one prompt at a time can be streamed, as in transformers")
        opt.refuse_unsupported(generation_config, arguments, batch=batch, processors=logits_processor)
        mask = arguments.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        captured = opt.Captured(input_ids, mask, logits_processor, stopping_criteria, generation_config)
        rows = [self._row(index, captured) for index in range(batch)]
        target = self._target(model)
        sampling = opt.draft_sampling(generation_config)
        loop = DecodeLoop(
            target, make_proposer(self.draft, target, plan=self.plan, sampling=sampling), scratch=self.plan.scratch
        )
        for commit in loop.run(rows):
            if streamer is not None:
                for token in commit.tokens:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        self.stats = loop.stats
        return self._output(rows, captured)

    def _target(self, model: Any) -> Target:
        if model not in self._targets:
            self._targets[model] = Target(model)
        return self._targets[model]

    def _row(self, index: int, captured: opt.Captured) -> RowState:
        ids, mask = captured.ids[index].tolist(), captured.attention_mask[index].tolist()
        pads = mask.index(1) if 1 in mask else len(mask)
        if 0 in mask[pads:] or pads == len(mask):
            raise UnsupportedOption(f"attention_mask: row {index} is not left-padded; pad on the left")
        seed = int(torch.randint(2**62, ())) if captured.config.do_sample else 0
        return make_row(index, ids[pads:], captured, padding=ids[:pads], seed=seed)

    def _output(self, rows: list[RowState], captured: opt.Captured) -> Any:
        config = captured.config
        longest = max(len(row.new_tokens) for row in rows)
        pad = config.pad_token_id
        tail = torch.full((len(rows), longest), 0 if pad is None else int(pad), dtype=torch.int64)
        for index, row in enumerate(rows):
            tail[index, : len(row.new_tokens)] = torch.tensor(row.new_tokens, dtype=torch.int64)
        sequences = torch.cat([captured.ids, tail.to(captured.ids.device)], dim=-1)
        if not config.return_dict_in_generate:
            return sequences
        scores = self._recorded(rows, "scores", longest) if config.output_scores else None
        logits = self._recorded(rows, "logits", longest) if config.output_logits else None
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)  # type: ignore[arg-type]

    def _recorded(self, rows: list[RowState], kind: str, longest: int) -> tuple[Tensor, ...]:
        """Per step [B, V]; a row that has ended holds zeros, since no token was chosen there."""
        lists = [getattr(row.record, kind) for row in rows]
        blank = torch.zeros_like(lists[0][0])
        return tuple(torch.stack([row[step] if step < len(row) else blank for row in lists]) for step in range(longest))
