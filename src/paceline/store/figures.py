"""How figures stand in records: plain values with as many digits as a measurement can claim.

It knows no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGITS = 6  # significant digits of a figure in a record


def rounded(value: Any) -> Any:
    """The same plain value, its floats with DIGITS significant digits, in mappings too."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
