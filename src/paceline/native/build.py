"""Compile the native library once for this machine, with the compiler the user has, and keep the result.

It knows compilers, flags and the cache folder, and nothing of models.  A library is named by a digest of everything
that went into it (source, flags, compiler, processor and its instruction sets), so a stale one is never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from paceline.machine import cache_folder, cpu_features, cpu_name

SOURCES = ("forward.cpp", "rows.cpp", "attention.h", "product.h", "team.h", "vectors.h", "call.h")
# Not -ffast-math: infinities mark what is masked.  Contraction to fused multiply-adds is asked for by name, since
# compilers differ in their default.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
PORTABLE = ("-DPACELINE_PORTABLE",)
_LOG = logging.getLogger("paceline")
SECONDS = 900  # for one compilation; five are usual, a minute the first time with ziglang


class Unavailable(Exception):
    """Why the native forward cannot be had; the text completes the sentence "runs on torch eager, because ..."."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, else g++, else clang++, else the one in the wheel `ziglang`.

    Raises Unavailable where there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise Unavailable(f"$CXX names '{chosen[0]}', which is not a program on PATH")
        return chosen
    for name in ("g++", "clang++"):
        if shutil.which(name) is not None:
            return [name]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise Unavailable("no C++ compiler was found (install g++ or clang++, or: pip install ziglang)")


def build_library(*, tuning: Sequence[Sequence[str]] = TUNING) -> Path:
    """The compiled library, made now if this machine has none yet.

    tuning: flags for the processor, tried in order.  Raises Unavailable with the compiler's first error.
    """
    compiler = find_compiler()
    identity = _identity(compiler)
    fault = ""
    for flags in tuning:
        target = cache_folder() / "native" / f"forward-{_digest([*FLAGS, *flags], identity)}.so"
        if target.is_file():
            return target
        if not fault:
            _LOG.warning("compiling the native forward for this machine, once, with %s", _spell(compiler))
        fault = _compile(compiler, flags, target)
        if not fault:
            return target
    raise Unavailable(f"{_spell(compiler)} cannot compile it: {fault}")


def source_folder() -> Path:
    """Where the C++ sources lie."""
    return Path(__file__).parent


def _compile(compiler: Sequence[str], flags: Sequence[str], target: Path) -> str:
    """Compile to `target`, whole or not at all; returns "" or the first error."""
    aside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    units = [str(source_folder() / name) for name in SOURCES if name.endswith(".cpp")]
    command = [*compiler, *FLAGS, *flags, "-o", str(aside), *units]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode != 0:
            return _first_error(done.stderr)
        aside.replace(target)
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or target.parent}"
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return ""


def _identity(compiler: Sequence[str]) -> list[str]:
    """Compiler and processor, as text."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{_spell(compiler)} does not run: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{_spell(compiler)} does not run: {_first_error(done.stderr)}")
    return [*compiler, done.stdout, cpu_name(), cpu_features()]


def _digest(flags: Sequence[str], identity: Sequence[str]) -> str:
    parts = [*((source_folder() / name).read_text("utf-8") for name in SOURCES), *flags, *identity]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it gave no reason")[:200]


def _spell(compiler: Sequence[str]) -> str:
    return " ".join([Path(compiler[0]).name, *compiler[1:]])
