"""The target writes its own prompts, then its own answers: training data in the target's own words.

A prompt is sampled after an opened user turn of the target's chat template, begun by a short opener so that subjects
vary; its answer is then decoded as it would be served.  Rows are a function of (seed, index) up to rounding; a stopped
run goes on where it was.  It knows nothing of drafts.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.config import Section, parse_section
from paceline.decoding.continuous import ContinuousBatch, Finished, Request
from paceline.errors import ConfigError, DataError
from paceline.targets.generic import Target
from paceline.toml import read_toml

MARK = "paceline-opened-user-turn"
HOPELESS = 256  # prompts dropped before the first usable one


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """How rows are written; the fingerprint of a run is the digest of this record.

    sampled_share: share of answers that are sampled at answer_temperature; the others are greedy.
    """

    seed: int = 0
    max_prompt_tokens: int = 160
    max_answer_tokens: int = 224
    prompt_temperature: float = 0.9
    prompt_top_p: float = 0.95
    sampled_share: float = 0.25
    answer_temperature: float = 0.8
    top_k: int = 50
    slots: int = 64

    def digest(self) -> str:
        """Short sha256 of all settings that decide what is written (the number of slots does not)."""
        settings = {key: value for key, value in asdict(self).items() if key != "slots"}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Job:
    """Row `index`: which kind of prompt is asked for, and how it is answered."""

    index: int
    category: str
    system: str
    opener: str
    temperature: float
    seed: int


class Category(Section):
    """One kind of prompt.  weight: its share, relative to the others.  systems, openers: texts to choose from."""

    name: str
    weight: float = Field(gt=0)
    systems: tuple[str, ...] = Field(min_length=1)
    openers: tuple[str, ...] = Field(min_length=1)


class Seeds(Section):
    """A seeds file."""

    category: tuple[Category, ...] = Field(min_length=1)


def load_seeds(path: Path | None = None) -> list[dict[str, Any]]:
    """The categories of a seeds file (default: the packaged one): name, weight, systems, openers.

    Raises DataError, one line that names file and key.
    """
    place = path or resources.files("paceline.data").joinpath("seeds.toml")
    try:
        seeds = parse_section(Seeds, table=read_toml(place), source=str(place))
    except ConfigError as error:
        raise DataError(f"{error}; expected seeds, a TOML file with [[category]] tables") from error
    return [category.model_dump() for category in seeds.category]


def make_job(index: int, *, options: SynthOptions, categories: list[dict[str, Any]]) -> Job:
    """The job of a row, from (seed, index) alone."""
    dice = random.Random(f"{options.seed}:{index}")
    category = dice.choices(categories, weights=[entry["weight"] for entry in categories])[0]
    system, opener = dice.choice(category["systems"]), dice.choice(category["openers"])
    temperature = options.answer_temperature if dice.random() < options.sampled_share else 0.0
    return Job(index, category["name"], system, opener, temperature, dice.getrandbits(48))


def messages_before(job: Job, prompt: str) -> list[dict[str, str]]:
    """The conversation up to and with the user's turn."""
    system = [{"role": "system", "content": job.system}] if job.system else []
    return [*system, {"role": "user", "content": prompt}]


def opened_user_turn(tokenizer: Any, job: Job) -> list[int]:
    """Ids of the chat template up to the opener inside an unfinished user turn."""
    text = tokenizer.apply_chat_template(messages_before(job, MARK), tokenize=False)
    if text.count(MARK) != 1:
        raise DataError(
            "the chat template does not show the user's text exactly once; write prompts from a file instead"
        )
    return tokenizer(text[: text.index(MARK)] + job.opener.rstrip(" "), add_special_tokens=False)["input_ids"]


def finish_prompt(text: str, *, reason: str) -> tuple[str, str]:
    """(prompt, "") or ("", why it is dropped).  A prompt cut by length is shortened to its last whole sentence."""
    text = text.strip()
    if reason == "length":
        ends = [match.end() for match in re.finditer(r"[.?!:](?=\s)|\n", text)]
        text = text[: ends[-1]].strip() if ends else ""
    words = re.findall(r"\w+", text.lower())
    if len(words) < 4:
        return "", "too short"
    if len(words) > 24 and len(set(words)) < 0.35 * len(words):
        return "", "repeats itself"
    return text, ""


class Synth:
    """Turns row indices into rows: a prompt of the target's own, then its answer.

    on_drop: called with (index, reason) when a prompt is not worth answering; `dropped` counts the reasons and `seen`
    holds the normalised prompts, so that none is asked twice.
    """

    def __init__(
        self,
        target: Target,
        *,
        options: SynthOptions,
        categories: list[dict[str, Any]],
        on_drop: Callable[[int, str], None] = lambda index, why: None,
    ) -> None:
        self.target, self.options, self.categories, self.on_drop = target, options, categories, on_drop
        self.tokenizer = target.tokenizer
        self.dropped: Counter[str] = Counter()
        self.seen: set[str] = set()
        self._jobs: dict[int, Job] = {}
        self._prompts: dict[int, str] = {}
        eos = {self.tokenizer.eos_token_id}
        configured = target.model.generation_config.eos_token_id
        eos.update(configured if isinstance(configured, list) else [configured])
        self.stop_ids = frozenset(token for token in eos if token is not None)

    def rows(self, indices: Iterator[int]) -> Iterator[dict[str, Any]]:
        """Finished rows in the order in which they end; stops when `indices` ends and all started rows ended."""
        options = self.options
        capacity = 2 * options.max_prompt_tokens + options.max_answer_tokens + 128
        batch = ContinuousBatch(self.target, slots=options.slots, capacity=capacity)
        batch.submit(self._prompt_request(index) for _, index in zip(range(options.slots), indices, strict=False))
        for finished in batch.run():
            for item in finished:
                kind, index = item.request.key  # type: ignore[misc]
                if kind == "prompt":
                    request = self._answer_request(self._jobs[index], item)
                    if request is not None:
                        batch.submit([request])
                        continue
                else:
                    yield self._row(self._jobs.pop(index), item)
            batch.submit(self._prompt_request(index) for _, index in zip(range(batch.free), indices, strict=False))

    def _prompt_request(self, index: int) -> Request:
        job = make_job(index, options=self.options, categories=self.categories)
        self._jobs[index] = job
        return Request(
            key=("prompt", index),
            ids=opened_user_turn(self.tokenizer, job),
            max_new_tokens=self.options.max_prompt_tokens,
            stop_ids=self.stop_ids,
            temperature=self.options.prompt_temperature,
            top_k=self.options.top_k,
            top_p=self.options.prompt_top_p,
            seed=job.seed,
        )

    def _answer_request(self, job: Job, written: Finished) -> Request | None:
        text = job.opener.rstrip(" ") + self.tokenizer.decode(written.tokens, skip_special_tokens=True)
        prompt, why = finish_prompt(text, reason=written.reason)
        key = " ".join(prompt.lower().split())
        if not why and key in self.seen:
            why = "already asked"
        if why:
            self.dropped[why] += 1
            self.on_drop(job.index, why)
            self._refuse_hopeless()
            del self._jobs[job.index]
            return None
        self.seen.add(key)
        self._prompts[job.index] = prompt
        messages = messages_before(job, prompt)
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        return Request(
            key=("answer", job.index),
            ids=ids,
            max_new_tokens=self.options.max_answer_tokens,
            stop_ids=self.stop_ids,
            temperature=job.temperature,
            top_k=self.options.top_k,
            seed=job.seed + 1,
        )

    def _refuse_hopeless(self) -> None:
        """A target that writes no usable prompt would be asked for ever."""
        drops = sum(self.dropped.values())
        if drops >= HOPELESS and not self._prompts and not self.seen:
            why, count = self.dropped.most_common(1)[0]
            raise DataError(
                f"the first {drops} prompts were all dropped ({count}: {why}); this target does not write prompts "
                "after an opened user turn: take prompts from a file, or change --seeds"
            )

    def _row(self, job: Job, answer: Finished) -> dict[str, Any]:
        prompt = self._prompts.pop(job.index)
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return {
            "index": job.index,
            "category": job.category,
            "messages": [*messages_before(job, prompt), {"role": "assistant", "content": text}],
            "temperature": job.temperature,
            "finish": answer.reason,
            "answer_tokens": len(answer.tokens),
        }
