"""The folder of a study: what stands where, and whether a finished part is the one that the study asks for.

    study.toml           the study as it was asked for last      trials/ARM/    short runs: what a step costs
    cells/ARM-seedN/     cell.json, train.log and the run        bench/         observations of each seed, and logs
    study.json, study.md the results

It trains and measures nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config import Recipe, dump_recipe
from paceline.errors import ConfigError, DataError
from paceline.measure.ledger import Observation, read_observation
from paceline.measure.study import SeedRun
from paceline.store.draft_facts import FACTS
from paceline.store.draft_names import find_draft
from paceline.store.files import sha256_file, write_text
from paceline.training.budget import Spent, spent
from paceline.training.log import LOG, read_log
from paceline.training.snapshot import FREE
from paceline.training.study import Cell, Study

CELL, RUN, TRAIN_LOG, STUDY = "cell.json", "run", "train.log", "study.toml"


class StudyFolder:
    """Paths below `root` and the states that they are in."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check(self) -> None:
        """Raises ConfigError where something else than a study's folder is."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"--out: {self.root} is a file, expected a folder; choose another --out")
        if self.root.is_dir() and any(self.root.iterdir()) and not (self.root / STUDY).is_file():
            raise ConfigError(f"--out: {self.root} holds files and no study; expected a new folder, or a study's")

    def begin(self, study: Study) -> None:
        """Keep in it what was asked for."""
        write_text(self.root / STUDY, dump_recipe(study))

    def cell(self, cell: Cell) -> Path:
        """Of a cell."""
        return self.root / "cells" / cell.name

    def trial(self, cell: Cell) -> Path:
        """Of an arm's short run."""
        return self.root / "trials" / cell.arm

    def bench(self, study: Study, *, seed: int, temperature: float, drafts: Mapping[str, str]) -> Path:
        """Where a run's observations go; another file for other prompts, plans or drafts.

        drafts: arm -> fingerprint.
        """
        asked = json.dumps([study.measure.model_dump(mode="json", exclude={"temperatures"}), drafts], sort_keys=True)
        digest = hashlib.sha256(asked.encode()).hexdigest()[:8]
        return self.root / "bench" / f"seed{seed}-t{temperature:g}-{digest}.json"

    def draft(self, cell: Cell, *, weights: str) -> Path:
        """The draft that is measured.  weights: last or best."""
        return find_draft(cell.draft) if cell.draft is not None else self.cell(cell) / RUN / weights


def begin_part(folder: Path, *, recipe: Recipe, start: str | None, is_trial: bool = False) -> Spent | None:
    """What a part has cost if it is finished, else None once it may be begun or gone on with.

    Raises ConfigError when what stands there was trained in another way: it is never replaced in silence.
    """
    asked, path = _identity(recipe, start=start), folder / CELL
    if not path.is_file():
        write_text(path, json.dumps({"asked": asked, "spent": None}, indent=1) + "\n")
        return None
    found = _read(path)
    differing = [key for key in {**found["asked"], **asked} if found["asked"].get(key) != asked.get(key)]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{folder} was trained with {key} = {found['asked'].get(key)}, now {asked.get(key)}; choose another --out, "
            f"or remove that folder to {'measure' if is_trial else 'train'} it again"
        )
    return None if found["spent"] is None else Spent(**found["spent"])


def end_part(folder: Path) -> Spent:
    """Note that a part is finished, and what it has cost."""
    found, costs = _read(folder / CELL), spent(read_log(folder / RUN / LOG))
    write_text(folder / CELL, json.dumps({**found, "spent": asdict(costs)}, indent=1) + "\n")
    return costs


def finished_part(folder: Path) -> Spent | None:
    """What a part has cost, whatever it was asked for; None while it is not finished."""
    found = _read(folder / CELL)["spent"] if (folder / CELL).is_file() else None
    return None if found is None else Spent(**found)


def read_run(path: Path, *, seed: int, temperature: float) -> SeedRun:
    """A finished interleaved run.  Raises DataError for a file that is not one."""
    found = _read(path)
    try:
        observations: list[Observation] = [read_observation(each) for each in found["observations"]]
        return SeedRun(seed, temperature, found["conditions"], observations, tuple(found["skipped"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not the observations of a study; remove it and run again") from error


def _identity(recipe: Recipe, *, start: str | None) -> dict[str, Any]:
    """What must be equal for a part to be the one that is asked for, as plain values."""
    sections = recipe.model_dump(mode="json")
    kept = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
        if not (section == "training" and key in FREE)
    }
    # draft.toml holds the digest of the weights.
    return {**kept, "warm_start": None if start is None else sha256_file(find_draft(start) / FACTS)}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}; remove it and run again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: found {type(found).__name__}, expected an object; remove it and run again")
    return found  # pyright: ignore[reportUnknownVariableType]
