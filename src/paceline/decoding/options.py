"""Generation options: transformers itself turns them into processors and stopping criteria; we honour or refuse each.

`capture` asks `model.generate` for what it would have used, so that no option is parsed twice.  Rows are verified one
by one, hence what depends on the place in a batch is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paceline.decoding.sampling import DraftSampling
from paceline.decoding.verify import Process, Stop
from paceline.errors import UnsupportedOption

# option -> values under which it changes nothing
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "token_healing": (None, False),
}
PER_BATCH = {"PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"}
PREPARED_ARGUMENTS = {"attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class Captured:
    """What transformers prepared for one call.

    ids: [B, T] int64 with left padding.  attention_mask: [B, T].
    """

    ids: Tensor
    attention_mask: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


def refuse_unsupported(config: GenerationConfig, arguments: dict[str, Any], *, batch: int, processors: Sequence[Any]) -> None:
    """One line naming the first option that cannot be honoured exactly."""
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise UnsupportedOption(
                f"{name}={value!r} cannot be combined with speculative decoding; leave it out or decode without a draft"
            )
    for name in ("past_key_values", "cache"):
        cache = arguments.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise UnsupportedOption(f"{name}: speculative decoding keeps its own cache and cannot continue a foreign one")
    unknown = sorted(
        name
        for name, value in arguments.items()
        if name not in PREPARED_ARGUMENTS | {"past_key_values", "cache"} and value is not None
    )
    if unknown:
        raise UnsupportedOption(f"{unknown[0]}: this model input is not known to speculative decoding; leave it out")
    per_batch = [type(entry).__name__ for entry in processors if type(entry).__name__ in PER_BATCH]
    if batch > 1 and per_batch:
        raise UnsupportedOption(f"{per_batch[0]} depends on the place in the batch; decode one prompt at a time")


def capture(model: Any, ids: Tensor, *, attention_mask: Tensor, options: dict[str, Any]) -> Captured:
    """Let transformers prepare processors, criteria and configuration for `options`, without decoding."""
    caught: list[Captured] = []

    def catch(
        model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, **arguments: Any,
    ) -> Tensor:  # fmt: skip
        arguments = {name: value for name, value in arguments.items() if name not in ("synced_gpus", "streamer")}
        refuse_unsupported(generation_config, arguments, batch=len(input_ids), processors=logits_processor)
        caught.append(Captured(input_ids, attention_mask, logits_processor, stopping_criteria, generation_config))
        return input_ids

    model.generate(ids, attention_mask=attention_mask, custom_generate=catch, **options)
    return caught[0]


def row_process(processors: LogitsProcessorList, *, padding: Sequence[int], device: torch.device) -> Process | None:
    """The processors as a function of one row's ids; `padding` are the pads that transformers keeps before them."""
    if not processors:
        return None
    pads = list(padding)

    def process(ids: list[int], logits: Tensor) -> Tensor:
        full = torch.tensor([pads + ids], device=device)
        return processors(full, logits[None].to(torch.float32, copy=True))[0]

    return process


def row_stop(criteria: StoppingCriteriaList, *, padding: Sequence[int], device: torch.device) -> Stop:
    """The criteria as a function of one row's ids; lengths and ends of text without a tensor."""
    eos: set[int] = set()
    longest: list[int] = []
    others: list[Callable[..., Any]] = []
    for entry in criteria:
        if type(entry) is EosTokenCriteria:
            eos.update(entry.eos_token_id.tolist())
        elif type(entry) is MaxLengthCriteria:
            longest.append(entry.max_length - len(padding))
        else:
            others.append(entry)
    limit = min(longest, default=None)
    pads = list(padding)

    def is_stop(ids: list[int]) -> bool:
        if ids[-1] in eos or (limit is not None and len(ids) >= limit):
            return True
        if not others:
            return False
        full = torch.tensor([pads + ids], device=device)
        return any(bool(torch.as_tensor(entry(full, None)).all()) for entry in others)

    return is_stop


def draft_sampling(config: GenerationConfig) -> DraftSampling:
    """The draft's warpers: the request's temperature, top-k and top-p."""
    if not config.do_sample:
        return DraftSampling()
    return DraftSampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p,
    )
