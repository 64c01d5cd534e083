"""What a target may run in C++: a forward of Llama-shaped models in float32, attention of single tokens in bfloat16.

`choose` and `choose_rows` decide whether a model gets them.  The eager call stays the slow twin of both: they are
compared before the first use.
"""

from __future__ import annotations

import logging
from typing import Any

from paceline.native.build import Unavailable, build_library
from paceline.native.library import Library
from paceline.targets import _transformers as tf
from paceline.targets._native.model import NativeForward
from paceline.targets._native.parts import Parts
from paceline.targets._native.probe import EagerScore, compare
from paceline.targets._native.rows import RowAttention, StepScore

__all__ = ["NativeForward", "RowAttention", "Unavailable", "choose", "choose_rows", "say_eager", "say_torch"]

_LOG = logging.getLogger("paceline")


def choose(model: Any, *, eager: EagerScore, name: str) -> NativeForward | None:
    """The native forward of a model, or None after one line in the log that says why torch eager is used.

    eager: the slow twin, compared with on a few tokens.  name: what the line calls the target.
    """
    try:
        parts = Parts(model)  # before anything is compiled
        native = NativeForward(model, parts, Library(build_library()))
        compare(native, eager=eager, vocab_size=model.config.vocab_size)
    except Unavailable as reason:
        say_eager(name, reason)
        return None
    return native


def choose_rows(model: Any, *, score: StepScore, name: str) -> RowAttention | None:
    """Native attention for steps of one token per row, or None after one line in the log that says why not.

    score: the eager call, compared with on a few tokens.  name: what the line calls the target.
    """
    try:
        if not tf.attends_plainly(model):  # before anything is compiled
            raise Unavailable("its attention slides over a window, or is not torch's scaled dot product")
        rows = RowAttention(model, Library(build_library()))
        rows.compare(score=score, vocab_size=tf.text_config(model).vocab_size)
    except Unavailable as reason:
        say_torch(name, reason)
        return None
    return rows


def say_eager(name: str, reason: Unavailable) -> None:
    """Tell the user that torch eager is used, and why."""
    _LOG.warning("%s runs on torch eager, because %s", name, reason)


def say_torch(name: str, reason: Unavailable) -> None:
    """Tell the user that steps of one token attend by torch, and why."""
    _LOG.warning("%s attends in torch also to single tokens, because %s", name, reason)
