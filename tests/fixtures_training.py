"""Tiny runs: rows on disk, a recipe, a target with a tokenizer, and an onlooker that remembers what it is told."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fixtures_models import bigram_model, make_target, tiny_llama
from fixtures_text import WORDS, tiny_tokenizer
from paceline.config import Recipe, parse_recipe
from paceline.data.examples import Example
from paceline.drafts._base import DraftNetwork
from paceline.store.checkpoint import load_draft
from paceline.store.training_state import saved_states
from paceline.targets.generic import Target
from paceline.training.log import LOG, read_log
from paceline.training.parallel import make_accelerator
from paceline.training.prepare import Examples, prepare
from paceline.training.trainer import Trainer

SAYABLE = tuple(word for word in WORDS if word not in ("\n", "system", "user", "assistant", "tool"))
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
RECIPE = """
[draft]
vocab_size = 40
options = {{ intermediate_size = 32 }}
[data]
train = ["{rows}"]
max_length = 48
[objective]
options = {{ steps = 2 }}
[training]
steps = 6
tokens_per_batch = 96
learning_rate = 1e-2
warmup_steps = 2
save_every = 100
validate_every = 100
log_every = 2
[validation]
prompts = 2
depth = 3
"""
TIMES = ("seconds", "took", "tokens_per_s")


class Onlooker:
    """Remembers every line and every step."""

    def __init__(self, *, die_at: int | None = None) -> None:
        self.die_at = die_at
        self.said: list[str] = []
        self.steps: list[int] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, done: int, total: int, values: Mapping[str, Any]) -> None:
        self.steps.append(done)
        if done == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def line(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        self.said.append(f"{event} {step}")

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def write_rows(path: Path, *, count: int, seed: int = 0, answer: str | None = None) -> Path:
    """Conversations of random words of very unequal lengths."""
    dice = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            question = " ".join(dice.choices(SAYABLE, k=dice.randint(1, 6)))
            words = answer or " ".join(dice.choices(SAYABLE, k=dice.choice((2, 3, 12))))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": words}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def recipe_of(rows: Path, *changes: str, text: str = RECIPE) -> Recipe:
    """The recipe above for a file of rows, with `section.field=value` changes."""
    return parse_recipe(text.format(rows=rows), source="test", overrides=changes)


def random_target(**options: Any) -> Target:
    """F2 with the tokenizer F4."""
    return make_target(tiny_llama(layers=3, **options), tokenizer=tiny_tokenizer(), name="tiny")


def counting_target() -> Target:
    """F1: after each number word comes the next one, after any other token `one`."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(NUMBERS)
    table = torch.zeros(64, 64)
    table[:, ids[0]] = 12.0
    for here, after in zip(ids, ids[1:] + ids[:1], strict=True):
        table[here] = 0.0
        table[here, after] = 12.0
    return make_target(bigram_model(table), tokenizer=tokenizer, name="counting")


def trained_draft(
    target: Target, texts: Sequence[tuple[list[int], int]], *, steps: int = 120, changes: Sequence[str] = ()
) -> DraftNetwork:
    """A draft that the real trainer has taught texts of (ids, prompt length), read back from the run's folder.

    The texts need no tokenizer, and so may be any that the target writes.  changes: of the recipe.
    """
    with tempfile.TemporaryDirectory() as place:
        changes = [*changes, *(f"training.{key}={steps}" for key in ("steps", "validate_every", "save_every"))]
        changes += ["training.tokens_per_batch=256", "draft.vocab_size=56", "data.supervise=all"]
        recipe = recipe_of(write_rows(Path(place) / "rows.jsonl", count=4), *changes)
        job = prepare(recipe, target=target, say=lambda line: None)
        lessons = tuple(_example(ids, prompt, index) for index, (ids, prompt) in enumerate(texts))
        accelerator = make_accelerator(recipe.training, out=Path(place), target=target)
        job = replace(job, examples=Examples(lessons, lessons[:2], True))
        watch = Onlooker()
        Trainer(job, out=Path(place) / "run", accelerator=accelerator, watch=watch, say=watch.say).run()
        target.set_taps(())
        return load_draft(Path(place) / "run" / "last", target=target).draft


def _example(ids: list[int], prompt: int, index: int) -> Example:
    return Example(torch.tensor(ids), torch.arange(len(ids)) >= prompt, f"{index:064x}", f"text:{index}", "")


def last_state(out: Path) -> dict[str, Tensor]:
    """Every tensor of a run's newest state."""
    found = load_file(saved_states(out / "state")[-1] / "state.safetensors")
    return {name: tensor.clone() for name, tensor in found.items()}  # not a window on a file that a test may change


def events(out: Path) -> list[dict[str, Any]]:
    """A run's log without what the clock says."""
    return [{key: value for key, value in event.items() if key not in TIMES} for event in read_log(out / LOG)]
