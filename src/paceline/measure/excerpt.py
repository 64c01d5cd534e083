"""The few figures of a bench record that travel with a draft, and the line that says them.

An excerpt is a JSON object whose `record` names the record that it is made from; `paceline results` makes it anew.  It
knows no files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import DataError
from paceline.measure.record import KIND, to_json, usable

NAME = "record"  # the key that names the record
FIGURES = (
    "plan", "n", "accepted_length", "accepted_length_se", "s_wall", "s_wall_se", "s_wall_ci95", "identical",
)  # fmt: skip
CONDITIONS = ("device_name", "threads", "dtype", "engine", "paceline")


def rewrite_excerpt(document: str, *, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The excerpt made anew from the record that it names.  Raises DataError when there is none."""
    try:
        name = str(json.loads(document)[NAME])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'an excerpt is a JSON object that names its record, as {{"{NAME}": "core-x"}}') from error
    record = records.get(name)
    if record is None or record.get("kind") != KIND:
        raise DataError(f"an excerpt names the record {name!r}; expected one of `paceline bench`: measure it again")
    with usable(name):
        manifest = record["manifest"]
        return to_json(
            {
                NAME: name,
                "target": manifest["target"]["name"],
                "draft": {key: (manifest["draft"] or {}).get(key) for key in ("name", "fingerprint")},
                **{key: record[key] for key in FIGURES},
                **{key: manifest[key] for key in CONDITIONS},
            }
        )


def figures_line(figures: Mapping[str, Any]) -> str:
    """Accepted length, speed-up and number of prompts of a record, or of an excerpt of one, with a draft."""
    low, high = figures["s_wall_ci95"] or (None, None)
    interval = "" if low is None else f" (95 % interval {low:.2f} to {high:.2f})"
    return (
        f"accepted length {figures['accepted_length']:.2f}, {figures['s_wall']:.2f}x plain decoding{interval}, "
        f"{figures['n']} prompts"
    )
