"""How figures are written: in records plain values with as many digits as a measurement can claim, sizes with a unit.

It knows no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGITS = 6  # significant digits of a figure in a record
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def rounded(value: Any) -> Any:
    """The same plain value, its floats with DIGITS significant digits, in mappings too."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def size_text(num_bytes: int) -> str:
    """A size as a person reads it: `817 bytes`, `15.0 kB`, `1.5 GB`, `542 MB`.  num_bytes: 0 or more."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            count = num_bytes / size
            return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"
    return f"{num_bytes} bytes"
