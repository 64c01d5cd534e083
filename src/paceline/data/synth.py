"""The target writes its own prompts, then its own answers: training data in the target's own words.

A prompt is sampled after an opened user turn of the target's chat template, begun by a short opener so that subjects
vary; its answer is then decoded as it would be served (`data.answering`).  It knows nothing of drafts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Set
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.config import Section, parse_section
from paceline.data.answering import Answering, Job, SynthOptions
from paceline.data.rows import Message
from paceline.decoding.continuous import Finished, Request
from paceline.errors import ConfigError, DataError
from paceline.targets.generic import Target
from paceline.toml import read_toml

MARK = "paceline-opened-user-turn"
HOPELESS = 256  # prompts dropped before the first usable one


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
    dice = options.dice(index)
    category = dice.choices(categories, weights=[entry["weight"] for entry in categories])[0]
    system, opener = dice.choice(category["systems"]), dice.choice(category["openers"])
    temperature, seed = options.draw_manner(dice)
    return Job(index, category["name"], temperature, seed, system=system, opener=opener)


def messages_before(job: Job, prompt: str) -> list[dict[str, str]]:
    """The conversation up to and with the user's turn."""
    system = [{"role": "system", "content": job.system}] if job.system else []
    return [*system, {"role": "user", "content": prompt}]


def opened_user_turn(tokenizer: Any, job: Job) -> list[int]:
    """Ids of the chat template up to the opener inside an unfinished user turn."""
    text = tokenizer.apply_chat_template(messages_before(job, MARK), tokenize=False)
    if text.count(MARK) != 1:
        raise DataError(
            "the chat template does not show the user's text exactly once; give prompts with --prompts instead"
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


class Synth(Answering):
    """Turns row indices into rows, without end: a prompt of the target's own, then its answer."""

    def __init__(
        self,
        target: Target,
        *,
        options: SynthOptions,
        categories: list[dict[str, Any]],
        on_drop: Callable[[dict[str, Any]], None],
    ) -> None:
        capacity = 2 * options.max_prompt_tokens + options.max_answer_tokens + 128
        super().__init__(target, options=options, capacity=capacity, on_drop=on_drop)
        self.categories = categories

    def key(self, messages: list[Message]) -> str:
        """The user's text, however it is spaced and capitalised."""
        return " ".join(str(messages[-1]["content"]).lower().split())

    def requests(self, done: Set[int]) -> Iterator[Request]:
        """One for a prompt of every index."""
        return (self._prompt_request(index) for index in itertools.count() if index not in done)

    def next_request(self, written: Finished) -> Request | None:
        """The request for the answer to a prompt that is worth it.  Raises DataError when none ever is."""
        job = self.jobs[written.request.key[1]]  # type: ignore[index]
        text = job.opener.rstrip(" ") + self.tokenizer.decode(written.tokens, skip_special_tokens=True)
        prompt, why = finish_prompt(text, reason=written.reason)
        messages = messages_before(job, prompt)
        if not why and self.key(messages) in self.seen:
            why = "already asked"
        if why:
            self.drop(job.index, why)
            self._refuse_hopeless()
            del self.jobs[job.index]
            return None
        return self.answer_request(job, messages, ids=self.chat.prompt_ids(messages))

    def _prompt_request(self, index: int) -> Request:
        job = make_job(index, options=self.options, categories=self.categories)
        self.jobs[index] = job
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

    def _refuse_hopeless(self) -> None:
        """A target that writes no usable prompt would be asked for ever."""
        drops = sum(self.dropped.values())
        if drops >= HOPELESS and not self.seen:
            why, count = self.dropped.most_common(1)[0]
            raise DataError(
                f"the first {drops} prompts were all dropped ({count}: {why}); this target does not write prompts "
                "after an opened user turn: take prompts from a file with --prompts, or change --seeds"
            )
