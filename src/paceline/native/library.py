"""The compiled forward as Python sees it: its structs, field by field, and the threads it may borrow.

It knows neither models nor caches.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from paceline.native.build import Unavailable


class Matrix(ctypes.Structure):
    """Weights [outputs, inputs] and bias [outputs] or null."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Layer(ctypes.Structure):
    """A decoder layer."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        ("window", c_int64),
    )


class Model(ctypes.Structure):
    """A model: sizes and where its weights lie."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "heads", "key_heads", "width", "inner", "vocab", "words")),
        ("eps", c_float), ("scale", c_float), ("embed", c_void_p), ("embed_norm", c_void_p), ("norm", c_void_p),
        ("head", Matrix), ("layer", c_void_p),
    )  # fmt: skip


class Call(ctypes.Structure):
    """One forward call."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "nodes", "above", "capacity", "wanted", "taps", "threads")),
        *((name, c_void_p) for name in ("tokens", "depths", "lengths", "features", "mask")),
        *((name, c_void_p) for name in ("cos", "sin", "keys", "values", "rows", "tap_layers", "logits", "tapped")),
        *((name, c_void_p) for name in ("parallel", "thread_number", "thread_count")),
    )


class Rows(ctypes.Structure):
    """Attention of one query token per row."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "key_heads", "group", "width", "view", "threads")),
        *((name, c_int64) for name in ("row_step", "head_step")),
        *((name, c_void_p) for name in ("queries", "keys", "values", "counts", "out")),
        *((name, c_void_p) for name in ("parallel", "thread_number", "thread_count")),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class Team:
    """Addresses of the OpenMP runtime that torch has loaded, so that both use one set of threads.

    None where it was not found: the library then starts threads of its own for each call.
    """

    parallel: int | None
    thread_number: int | None
    thread_count: int | None


class Library:
    """A compiled forward.  Raises Unavailable if it cannot be loaded or was made for other structs."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path.name} cannot be loaded ({error}); remove it from the cache folder") from error
        self._handle.paceline_layout.restype = c_int64
        self._handle.paceline_forward.argtypes = [c_void_p, c_void_p]
        self._handle.paceline_forward.restype = c_int
        layout = int(self._handle.paceline_layout())
        mine = (ctypes.sizeof(Layer) * 1000 + ctypes.sizeof(Model)) * 1000 + ctypes.sizeof(Call)
        self._handle.paceline_rows_layout.restype = c_int64
        self._handle.paceline_rows.argtypes = [c_void_p]
        self._handle.paceline_rows.restype = c_int
        rows = int(self._handle.paceline_rows_layout())
        if layout // 1000 != mine or rows // 1000 != ctypes.sizeof(Rows):
            raise Unavailable(f"{path.name} was compiled for other structs; remove it from the cache folder")
        self.lanes = layout % 1000
        self.narrowest = rows % 1000  # numbers of the smallest head that attention of rows takes
        self.team = _find_team()

    def forward(self, model: Model, call: Call) -> int:
        """Run a call; returns the code that forward.cpp explains.  The interpreter is released meanwhile."""
        return self._handle.paceline_forward(ctypes.addressof(model), ctypes.addressof(call))

    def attend(self, rows: Rows) -> int:
        """Attention of rows; returns the code that rows.cpp explains.  The interpreter is released meanwhile."""
        return self._handle.paceline_rows(ctypes.addressof(rows))


def _find_team() -> Team:
    """GOMP_parallel as libgomp spells it; LLVM's and Intel's runtimes answer to the same name."""
    try:
        process = ctypes.CDLL(None)
        names = (process.GOMP_parallel, process.omp_get_thread_num, process.omp_get_num_threads)
    except (AttributeError, OSError, TypeError):
        return Team(None, None, None)
    return Team(*(ctypes.cast(name, c_void_p).value for name in names))
