"""A forward of Llama-shaped models in C++, for calls of few rows in float32 on the processor.

`choose` decides whether a model gets it.  The eager call stays its slow twin: they are compared before the first use.
"""

from __future__ import annotations

import logging
from typing import Any

from paceline.native.build import Unavailable, build_library
from paceline.native.library import Library
from paceline.targets._native.model import NativeForward
from paceline.targets._native.parts import Parts
from paceline.targets._native.probe import EagerScore, compare

__all__ = ["NativeForward", "Unavailable", "choose"]

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


def say_eager(name: str, reason: Unavailable) -> None:
    """Tell the user that torch eager is used, and why."""
    _LOG.warning("%s runs on torch eager, because %s", name, reason)
