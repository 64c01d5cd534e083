"""The decoders that a benchmark compares, each as one function from a prompt's ids to new ids.

Plain, with a draft, and transformers' own: generate, prompt lookup, assisted generation.  It knows how each is called
with the same options, and neither prompts nor clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.decoding.api import generate
from paceline.decoding.binding import Draft
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.stats import RunStats
from paceline.errors import ConfigError, UnsupportedOption
from paceline.ops.sampling import is_greedy
from paceline.plugins import suggestion
from paceline.targets.generic import Target

PLAIN = "plain"
BASELINES = ("hf", "prompt-lookup", "hf-assisted")
LOOKUP_TOKENS = 10  # transformers' documentation uses 10 for prompt_lookup_num_tokens
Decode = Callable[[list[int], int], tuple[list[int], RunStats | None]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every decoder decodes.  temperature 0 = greedy; top_p None = no filter."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if self.top_p is not None and (self.is_greedy or not 0 < self.top_p <= 1):
            raise ConfigError(f"top_p is {self.top_p}; expected a number in (0, 1], with a temperature above 0")

    @property
    def is_greedy(self) -> bool:
        """Whether outputs can be compared token by token."""
        return is_greedy(self.temperature)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `paceline.generate`."""
        filters = {} if self.top_p is None else {"top_p": self.top_p}
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, **filters}


@dataclass(frozen=True, slots=True)
class System:
    """One decoder.

    name: its key in records.  about: one line.  decode: (prompt ids, seed) -> (new ids, statistics or None).
    """

    name: str
    about: str
    decode: Decode


def plain_system(target: Target, *, sampling: Sampling) -> System:
    """The library's own loop without a draft."""
    return System(PLAIN, "the target alone, decoded by Paceline", _ours(target, None, None, sampling))


def draft_system(
    target: Target, draft: Draft, *, plan: ProposalPlan, sampling: Sampling, name: str | None = None
) -> System:
    """The same loop with a draft.  name: where a run has several drafts; None for the plan's own."""
    return System(name or str(plan), f"with the draft, {plan}", _ours(target, draft, plan, sampling))


def baseline_system(name: str, target: Target, *, sampling: Sampling, assistant: Any = None) -> System:
    """A decoder of transformers on the same model object.

    name: one of BASELINES.  assistant: a causal LM with the target's tokenizer, for `hf-assisted`; None lets the
    target's own first layers draft (transformers' `assistant_early_exit`).
    Raises ConfigError for an unknown name, UnsupportedOption for sampling.
    """
    if name not in BASELINES:
        raise ConfigError(f"--baseline: no '{name}'; {suggestion(name, known=BASELINES)}")
    if not sampling.is_greedy:
        raise UnsupportedOption(
            f"--baseline {name}: transformers samples from a global generator, so the run could not be repeated; "
            "use --temperature 0"
        )
    if name == "hf":
        return _theirs(target, sampling, name, "transformers generate", {})
    if name == "prompt-lookup":
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        return _theirs(target, sampling, name, f"transformers prompt lookup, {LOOKUP_TOKENS} tokens", extra)
    if assistant is not None:
        _require_same_words(target, assistant)
        about = f"transformers assisted generation, {type(assistant).__name__} as assistant"
        return _theirs(target, sampling, name, about, {"assistant_model": assistant})
    layers = max(1, target.num_layers // 4)
    about = f"transformers assisted generation, the target's first {layers} of {target.num_layers} layers as assistant"
    return _theirs(target, sampling, name, about, {"assistant_early_exit": layers})


def _require_same_words(target: Target, assistant: Any) -> None:
    found, expected = int(assistant.get_input_embeddings().weight.shape[0]), target.vocab_size
    if found != expected:
        raise ConfigError(
            f"--assistant: found a vocabulary of {found} ids, the target has {expected}; give a model of its family"
        )


def _ours(target: Target, draft: Draft | None, plan: ProposalPlan | None, sampling: Sampling) -> Decode:
    def decode(ids: list[int], seed: int) -> tuple[list[int], RunStats | None]:
        result = generate(target, ids, draft=draft, plan=plan, seed=seed, **sampling.options)
        return result.rows[0].tokens, result.stats

    return decode


def _theirs(target: Target, sampling: Sampling, name: str, about: str, extra: dict[str, Any]) -> System:
    def decode(ids: list[int], seed: int) -> tuple[list[int], RunStats | None]:
        prompt = torch.tensor([ids], device=target.device)
        with torch.no_grad(), _quiet():
            output = target.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                max_new_tokens=sampling.max_new_tokens, **extra,
            )  # fmt: skip
        return output[0, len(ids) :].tolist(), None  # sync

    return System(name, about, decode)


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """transformers warns about arguments that its own assisted generation sets; that is not the reader's concern."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def check_names(systems: Sequence[System]) -> None:
    """Raises ConfigError when two decoders would share a key."""
    names = [system.name for system in systems]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{twice[0]} is asked for twice; name each plan and baseline once")
