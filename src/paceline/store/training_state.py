"""The whole state of a training run at one step, as a folder that is either whole or absent; the last two are kept.

    OUT/state/step-00000500/state.safetensors   weights, optimiser moments, random states: named tensors
    OUT/state/step-00000500/state.json          step and plain values; sha256 of the tensors and of itself

No pickles.  This module knows neither trainer nor optimiser: names and values are the caller's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError
from paceline.store.files import folder_aside, remove_partial, sha256_file, write_text
from paceline.store.weights import read_tensors, refuse_full_disk, write_tensors

FORMAT = 1
KEPT = 2
TENSORS, VALUES = "state.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """step: optimiser steps done.  tensors: by name.  values: plain values that survive JSON unchanged."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def write_state(folder: Path, state: TrainingState) -> None:
    """Write a state below `folder`, whole or not at all, then remove all but the last two.

    Raises CheckpointError when the disk is full; earlier states stay.
    """
    place = folder / f"step-{state.step:08d}"
    with refuse_full_disk(place), folder_aside(place) as aside:
        write_tensors(aside / TENSORS, state.tensors)
        content = {
            "format": FORMAT,
            "step": state.step,
            "values": dict(state.values),
            "sha256": sha256_file(aside / TENSORS),
        }
        content["checksum"] = _checksum(content)
        write_text(aside / VALUES, json.dumps(content, indent=1) + "\n")
    for old in saved_states(folder)[:-KEPT]:
        shutil.rmtree(old)


def saved_states(folder: Path) -> list[Path]:
    """The states below a folder, oldest first; what a killed save left is removed."""
    for left in folder.glob(".step-*"):
        remove_partial(folder / left.name.split(".")[1])
    return sorted(folder.glob("step-*"))


def latest_state(folder: Path, *, say: Callable[[str], None]) -> TrainingState | None:
    """The newest whole state, or None where none was ever saved.

    A torn one is skipped, and told to `say`.  Raises CheckpointError when there are states and all are torn.
    """
    places = saved_states(folder)
    for place in reversed(places):
        try:
            return _read(place)
        except CheckpointError as error:
            say(f"skipped a torn state: {error}")
    if places:
        raise CheckpointError(f"{folder}: no whole state among {len(places)}; begin again in another folder")
    return None


def _read(place: Path) -> TrainingState:
    path = place / VALUES
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{path}: its checksum does not match")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version reads {FORMAT}")
    if not (place / TENSORS).is_file():
        raise CheckpointError(f"{place / TENSORS} is missing")
    if sha256_file(place / TENSORS) != content["sha256"]:
        raise CheckpointError(f"{place / TENSORS}: its sha256 does not match")
    return TrainingState(content["step"], read_tensors(place / TENSORS), content["values"])


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
