"""Captures and recipes: which examples a capture stores, how many bytes, and where a run gets its states from.

It knows recipes and says what it will do; the states themselves are `training.capture`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import Recipe
from paceline.data.examples import Example
from paceline.store.feature_index import Fingerprint
from paceline.store.features import FeatureReader, FeatureWriter
from paceline.store.figures import size_text
from paceline.targets.generic import Target
from paceline.training.capture import CaptureProgress, capture, feature_fingerprint
from paceline.training.prepare import Job, Say, chat_format, prepare, recipe_target
from paceline.training.sources import CapturedFeatures, FeatureSource, OnlineFeatures


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a capture will store.  num_bytes: upper bound of the folder's size."""

    target: Target
    examples: tuple[Example, ...]
    fingerprint: Fingerprint
    num_bytes: int


def plan_capture(recipe: Recipe, *, dtype: str, say: Say, target: Target | None = None) -> CapturePlan:
    """Read the rows, load the target and estimate the size; nothing is written.

    dtype: as stored, "float32" or "bfloat16".  target: one that is in memory, or None to load the recipe's.
    """
    if target is None:
        target = recipe_target(recipe, device="cpu")
    job = prepare(recipe, target=target, say=say)  # sets the taps that the recipe's draft reads
    examples = (*job.examples.train, *job.examples.validation)
    fingerprint = feature_fingerprint(target, chat=chat_format(recipe, target), dtype=dtype)
    tokens = sum(len(example.ids) for example in examples)
    size = fingerprint.estimate_bytes(num_tokens=tokens, num_rows=len(examples))
    say(
        f"features: {tokens} tokens x {fingerprint.bytes_per_token} bytes in {dtype} = {size_text(size)}, "
        f"taps {', '.join(map(str, target.taps))}"
    )
    return CapturePlan(target, examples, fingerprint, size)


def run_capture(
    plan: CapturePlan,
    *,
    folder: Path,
    max_disk: int | None,
    say: Say,
    report: Callable[[CaptureProgress], None] = lambda progress: None,
) -> CaptureProgress:
    """Store what the folder lacks, damaged shards included.  max_disk: cap in bytes on the whole folder."""
    with FeatureWriter(folder, fingerprint=plan.fingerprint, max_disk=max_disk) as writer:
        if writer.damaged:
            say(f"not what was captured, so captured again: {', '.join(writer.damaged)}")
        return capture(plan.target, plan.examples, writer=writer, report=report)


def feature_source(job: Job, *, device: torch.device, is_bf16: bool) -> FeatureSource:
    """Captured features if the recipe names a folder, else the target itself.

    Raises CheckpointError or DataError when the folder holds other states than this run needs.
    """
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    folder = job.recipe.data.features
    if folder is None:
        return OnlineFeatures(job.target, dtype=dtype)
    stored = FeatureReader(folder).fingerprint.dtype
    expected = feature_fingerprint(job.target, chat=chat_format(job.recipe, job.target), dtype=stored)
    reader = FeatureReader(folder, expected=expected, last=job.target.num_layers)
    source = CapturedFeatures(reader, dtype=dtype, device=device)
    source.require((*job.examples.train, *job.examples.validation))
    return source
