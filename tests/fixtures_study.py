"""A tiny study on disk: target, rows, recipe, prompts and the study file; and parts done without new processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixtures_models import tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import RECIPE, write_rows

STUDY = """
[study]
name = "tiny"
recipe = "{root}/recipe.toml"
set = [
  "training.steps=12", "training.save_every=3", "training.validate_every=6", "training.log_every=3",
  "training.threads=1",
]
seeds = [0, 1]
baseline = "ttt"
[[arms]]
name = "short"
set = ["objective.options={{ steps = 1 }}"]
[[arms]]
name = "ttt"
[measure]
workloads = ["{root}/a.jsonl", "{root}/b.jsonl"]
max_new_tokens = 8
plans = ["chain:2", "tree:2x2:3"]
temperatures = [0.0, 1.0]
warmup = 0
threads = 1
[pair]
arm = "short"
plan = "tree:2x2:3"
"""


def write_study(root: Path, text: str = STUDY) -> Path:
    """Everything that the study needs, and its file."""
    tiny_llama(layers=3).save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    rows = write_rows(root / "rows.jsonl", count=20)
    (root / "recipe.toml").write_text(f'[target]\nname = "{root / "target"}"\n' + RECIPE.format(rows=rows))
    for name, turns in (("a", ["hello", "name a city", "add one"]), ("b", ["what is one plus two", "bye"])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    (root / "study.toml").write_text(text.format(root=root))
    return root / "study.toml"


def in_this_process(work: Callable[..., None], arguments: tuple[Any, ...], *, log: Path, hear: Any) -> None:
    """In place of `run_child`, which pays for a new interpreter."""
    log.parent.mkdir(parents=True, exist_ok=True)
    work(hear, *arguments)
