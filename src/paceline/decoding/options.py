"""Generation options: transformers itself turns them into processors and stopping criteria; we honour or refuse each.

`capture` asks `model.generate` for what it would have used, so that no option is parsed twice.  This module knows
neither drafts nor trees.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from paceline.decoding.sampling import DraftSampling
from paceline.decoding.verify import Process, Recorder, Stop
from paceline.errors import ConfigError, UnsupportedOption
from paceline.ops.sampling import is_greedy
from paceline.targets import _transformers as tf


class GenerationOptions(TypedDict, total=False):
    """What `generate` accepts, under transformers' names and with their meaning."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    max_time: float | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    bos_token_id: int | None
    stop_strings: str | list[str] | None
    tokenizer: Any
    stopping_criteria: Any
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    sequence_bias: Any
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    watermarking_config: Any
    guidance_scale: float | None
    negative_prompt_ids: Any
    negative_prompt_attention_mask: Any
    logits_processor: Any
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None
    output_scores: bool | None
    output_logits: bool | None
    return_dict_in_generate: bool | None
    num_return_sequences: int | None
    generation_config: Any


# option -> values under which it changes nothing; any other value is refused
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "cache_config": (None,),
    "prefill_chunk_size": (None,),
    "low_memory": (None, False),
    "token_healing": (None, False),
    "streamer": (None,),
    "synced_gpus": (None, False),
}
# A filter that a model's own configuration may hold; `generate` filters nothing unless it is asked to.
NO_FILTER: dict[str, object] = {
    "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0
}  # fmt: skip
# Processors and criteria that treat every row alike, so that one row may be shown to them alone.
ROW_BY_ROW = frozenset(
    f"{name}Logits{kind}"
    for kind, names in {
        "Processor": (
            "SequenceBias", "NoRepeatNGram", "NoBadWords", "MinLength", "MinNewTokensLength", "ForcedBOSToken",
            "ForcedEOSToken", "InfNanRemove", "SuppressTokens", "SuppressTokensAtBegin",
        ),
        "Warper": ("Temperature", "TopH", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta"),
    }.items()
    for name in names
) | {"LogitNormalization", "ExponentialDecayLengthPenalty", "StopStringCriteria", "MaxTimeCriteria"}  # fmt: skip
REMEMBERS = "UnbatchedClassifierFreeGuidanceLogitsProcessor"  # keeps the keys of its own context from call to call
PREPARED = {  # model inputs that transformers adds on its own
    "attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep", "past_key_values", "cache"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Captured:
    """What transformers prepared for one call.

    ids: [B, T] int64 with left padding.  attention_mask: [B, T].  criteria: each of them on its own.
    """

    ids: Tensor
    attention_mask: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def pad_token(self) -> int | None:
        """What transformers puts behind a row that has ended: the pad token, or else an end token."""
        return tf.pad_token(self.config)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands in the batch that transformers prepared: row `row` of `batch`, behind `padding` pads."""

    row: int
    batch: int
    padding: list[int]

    def ids(self, ids: list[int], *, copies: int, device: torch.device) -> Tensor:
        """[copies, T] int64, as transformers would show the row."""
        return torch.tensor([self.padding + ids], device=device).repeat(copies, 1)

    def copies(self, entries: Sequence[object]) -> int:
        """Rows to show: one where all entries treat rows alike, else the whole batch filled with this row."""
        return 1 if all(type(entry).__name__ in ROW_BY_ROW for entry in entries) else self.batch

    def own(self, values: Tensor) -> Tensor:
        """This row's entry of what came back."""
        return values[self.row] if len(values) > 1 else values[0]


def refuse_unknown(options: GenerationOptions) -> None:
    """Name an option that is none, which transformers would take for a model input, or one that cannot be honoured."""
    known = GenerationOptions.__annotations__.keys() | NEUTRAL.keys()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UnsupportedOption(f"{name} is not an option of speculative decoding{hint}")
    for name in NEUTRAL:
        _refuse_unless_neutral(name, dict(options).get(name))


def _refuse_unless_neutral(name: str, value: object) -> None:
    if not any(value is neutral or value == neutral for neutral in NEUTRAL[name]):
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
        raise UnsupportedOption(
            f"{name}={shown} cannot be combined with speculative decoding; leave it out or decode without a draft"
        )


def refuse_unsupported(captured: Captured, arguments: dict[str, Any]) -> None:
    """One line naming the first option that cannot be honoured exactly.  arguments: the model's inputs."""
    values = captured.config.to_dict()
    for name in NEUTRAL:
        _refuse_unless_neutral(name, values.get(name))
    for name in ("past_key_values", "cache"):
        if tf.is_users_cache(arguments.get(name)):
            raise UnsupportedOption(f"{name}: speculative decoding keeps its own cache and cannot continue a given one")
    unknown = sorted(name for name, value in arguments.items() if name not in PREPARED and value is not None)
    if unknown:
        raise UnsupportedOption(f"{unknown[0]}: this model input is not known to speculative decoding; leave it out")
    _refuse_positions(captured.attention_mask, arguments.get("position_ids"))
    batch = len(captured.ids)
    if batch > 1 and any(type(entry).__name__ == REMEMBERS for entry in captured.processors):
        raise UnsupportedOption("guidance_scale keeps a context of its own; decode one prompt at a time")


def _refuse_positions(mask: Tensor, positions: Tensor | None) -> None:
    if positions is None:
        return
    expected = mask.long().cumsum(dim=-1) - 1
    if positions.shape != expected.shape or bool(((positions != expected) & (mask == 1)).any()):
        raise UnsupportedOption("position_ids: positions are counted from each row's first token; leave them out")


def capture(model: Any, ids: Tensor, *, options: GenerationOptions) -> Captured:
    """Let transformers prepare processors, criteria and configuration for `options`, without decoding.

    ids: [1, T] int64.  Raises ConfigError for what transformers does not accept, UnsupportedOption for what we do not.
    """
    caught: list[Captured] = []
    mask = torch.ones_like(ids)

    def catch(
        model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, synced_gpus: bool = False, streamer: Any = None, **arguments: Any,
    ) -> Tensor:  # fmt: skip
        rows = torch.ones_like(input_ids)
        captured = Captured(input_ids, rows, logits_processor, stopping_criteria, generation_config)
        refuse_unsupported(captured, arguments)
        caught.append(captured)
        return input_ids

    with _one_line():
        model.generate(ids, attention_mask=mask, custom_generate=catch, **options)
    return caught[0]


@contextmanager
def _one_line() -> Generator[None, None, None]:
    """What transformers says about an option, when it prepares it or applies it, as one line of ours."""
    try:
        yield
    except (ValueError, IndexError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def with_stop_strings(options: GenerationOptions, *, model: Any, tokenizer: Any) -> GenerationOptions:
    """Stop strings as a stopping criterion: `generate` loses the tokenizer on its way to a custom decoding method."""
    given = options.get("generation_config")
    strings = options.get("stop_strings")
    if strings is None and given is not None:
        strings = given.stop_strings
    if strings is None:
        strings = model.generation_config.stop_strings
    tokenizer = options.get("tokenizer") or tokenizer
    rest: GenerationOptions = {**options}
    rest.pop("tokenizer", None)
    if not strings:
        return rest
    if tokenizer is None:
        raise ConfigError("stop_strings need a tokenizer; give the target its tokenizer, or pass tokenizer=...")
    try:
        criterion = StopStringCriteria(tokenizer, strings)
    except ValueError as error:
        raise ConfigError(f"stop_strings: transformers cannot match them with this tokenizer ({error})") from None
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or []), criterion])
    return {**rest, "stop_strings": None, "stopping_criteria": criteria}


def with_sampling(options: GenerationOptions) -> GenerationOptions:
    """Greedy or sampling, decided once: do_sample if given, else a temperature of at least 1e-5.

    A temperature below 1e-5 is greedy whatever do_sample says.  Filters of the model's own configuration apply only
    with a `generation_config` given by the caller.
    """
    given = options.get("generation_config")
    rest: GenerationOptions = {**options}
    temperature, explicit = rest.pop("temperature", None), rest.pop("do_sample", None)
    if given is not None:
        temperature = given.temperature if temperature is None else temperature
        explicit = given.do_sample if explicit is None else explicit
    if options.get("output_scores") or options.get("output_logits"):
        rest["return_dict_in_generate"] = True
    sample = bool(explicit) if temperature is None else explicit is not False and not is_greedy(float(temperature))
    if not sample:
        return _drop(rest, (*NO_FILTER, "temperature")) | {"do_sample": False}
    filters = {name: value for name, value in NO_FILTER.items() if given is None and name not in rest}
    chosen = {"do_sample": True, "temperature": 1.0 if temperature is None else float(temperature)}
    return rest | filters | chosen  # type: ignore[return-value]


def _drop(options: GenerationOptions, names: Sequence[str]) -> GenerationOptions:
    return {name: value for name, value in options.items() if name not in names}  # type: ignore[return-value]


def row_process(processors: LogitsProcessorList, *, place: Place, device: torch.device) -> Process | None:
    """The processors as a function of one row's ids; they are called once for each committed token, in order."""
    if not processors:
        return None
    copies = place.copies(processors)

    def process(ids: list[int], logits: Tensor) -> Tensor:
        scores = logits.to(device, torch.float32)[None].repeat(copies, 1)
        shown = cast("torch.LongTensor", place.ids(ids, copies=copies, device=device))
        with _one_line():
            return place.own(processors(shown, cast("torch.FloatTensor", scores)))

    return process


def row_stop(criteria: StoppingCriteriaList, *, place: Place, device: torch.device, recorder: Recorder | None) -> Stop:
    """The criteria as a function of one row's ids; lengths and ends of text without a tensor.

    recorder: whose scores the criteria see, as transformers shows them only where scores are returned.
    """
    ends, longest, others = tf.split_criteria(criteria)
    limit = None if longest is None else longest - len(place.padding)
    copies = place.copies(others)

    def is_stop(ids: list[int]) -> bool:
        if ids[-1] in ends or (limit is not None and len(ids) >= limit):
            return True
        if not others:
            return False
        full = place.ids(ids, copies=copies, device=device)
        seen = None if recorder is None else tuple(scores[None].repeat(copies, 1) for scores in recorder.scores)
        return any(bool(place.own(torch.as_tensor(entry(full, seen)).reshape(-1))) for entry in others)

    return is_stop


def draft_sampling(config: GenerationConfig) -> DraftSampling:
    """The draft's warpers: the request's temperature, top-k and top-p."""
    if not config.do_sample:
        return DraftSampling()
    return DraftSampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p if config.top_p is not None and config.top_p < 1.0 else None,
    )
