"""A study file: which drafts are trained how (arms), for which seeds, with which budget, and what is measured on them.

It turns the file into cells, one recipe for each arm and seed, and refuses arms that cannot be compared.  It trains
nothing and knows no results.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config import MOST_SEED, Recipe, Section, apply_overrides, load_recipe, parse_section
from paceline.errors import ConfigError
from paceline.plugins import suggestion
from paceline.toml import read_toml

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]  # a folder's name too
Equal = Literal["tokens", "seconds"]
SCRATCH = "none"  # an arm's warm_start that takes the study's back
# Keys of a comparison's record, beside which its arm stands under its own name.
TAKEN = (
    "kind", "format", "name", "arms", "plan", "temperature", "num_prompts", "seeds", "identical", "per_file", "costs",
    "baseline", "study", "manifest",
)  # fmt: skip
# What two arms must share for a step of one to be a step of the other.
SHARED = ("steps", "epochs", "tokens_per_batch", "accumulation")


class StudySection(Section):
    """What all arms share.  set: changes of the recipe, `section.field=value`.  warm_start: a draft's folder."""

    name: Name
    recipe: str
    set: tuple[str, ...] = ()
    warm_start: str | None = None
    seeds: tuple[Annotated[int, Field(ge=0, le=MOST_SEED)], ...] = Field(default=(0,), min_length=1)
    baseline: str
    weights: Literal["last", "best"] = "last"  # last: after all steps; best: of the highest simulated accepted length


class ArmSection(Section):
    """One draft.  draft: a folder that is measured as it is, instead of training one."""

    name: Name
    set: tuple[str, ...] = ()
    recipe: str | None = None
    warm_start: str | None = None  # "none": from scratch, whatever the study says
    draft: str | None = None
    equal: Equal | None = None  # None = as the section budget says


class BudgetSection(Section):
    """When arms have had the same.

    tokens: same steps and batches.  seconds: an arm whose step is dearer takes fewer, so that its training takes as
    long as the baseline's; its learning rate falls over the steps that it takes.
    """

    equal: Equal = "tokens"
    trial_steps: int = Field(default=10, ge=1)  # steps by which the cost of a step is measured


class MeasureSection(Section):
    """What is decoded with every arm, in one interleaved run for each seed and temperature."""

    workloads: tuple[str, ...] = Field(min_length=1)
    prompts_per_file: int = Field(default=40, ge=1)
    max_new_tokens: int = Field(default=128, ge=1)
    plans: tuple[str, ...] = Field(default=("chain:5",), min_length=1)
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(default=(0.0,), min_length=1)
    warmup: int = Field(default=2, ge=0)
    threads: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    seed: int = Field(default=0, ge=0, le=2**31)


class PairSection(Section):
    """The comparison for which `paceline study --pair FILE` writes a record."""

    arm: str
    plan: str
    temperature: float = Field(default=0.0, ge=0)


class Study(Section):
    """A whole study file."""

    study: StudySection
    arms: tuple[ArmSection, ...] = Field(min_length=1)
    budget: BudgetSection = BudgetSection()
    measure: MeasureSection
    pair: PairSection | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm with one seed.

    recipe: what is trained; None for a draft that is measured as it is.  start: the draft to start from, a name or a
    folder.  draft: the finished draft that stands in for training.  equal: what it shares with the baseline.
    """

    arm: str
    seed: int
    recipe: Recipe | None
    start: str | None
    draft: str | None
    equal: Equal

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.arm}-seed{self.seed}"


def load_study(path: Path, *, overrides: Iterable[str] = ()) -> Study:
    """Read a study file and apply `section.field=value` overrides.  Raises ConfigError, one line."""
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such study; expected a TOML file")
    table = apply_overrides(read_toml(path), overrides=overrides, schema=Study)
    study = parse_section(Study, table=table, source=str(path))
    _check_names(study, source=str(path))
    return study


def study_cells(study: Study) -> list[Cell]:
    """All cells, seed by seed, the baseline of each seed first.  Raises ConfigError for arms that do not compare."""
    arms = sorted(study.arms, key=lambda arm: arm.name != study.study.baseline)  # the others in their own order
    cells = [_cell(study, arm, seed) for seed in study.study.seeds for arm in arms]
    baseline = cells[0].recipe
    recipes = [cell.recipe for cell in cells if cell.recipe is not None]
    for cell in cells:
        if cell.recipe is not None and baseline is not None:
            _check_shared(cell, baseline)
        if cell.recipe is not None and cell.recipe.target != recipes[0].target:
            raise ConfigError(f"arm {cell.arm} has another [target] than the others; a study measures on one target")
        if cell.equal == "seconds" and (baseline is None or baseline.training.steps is None):
            raise ConfigError(
                f"arm {cell.arm} has the baseline's seconds, so the baseline has to be trained for a number of steps; "
                "expected training.steps instead of training.epochs or a finished draft"
            )
    if not recipes:
        raise ConfigError("every arm is a finished draft, so nothing is trained; measure them with: paceline bench")
    return cells


def with_steps(cell: Cell, steps: int) -> Cell:
    """The cell with another number of optimiser steps; the learning rate falls over these."""
    assert cell.recipe is not None
    return replace(cell, recipe=change_training(cell.recipe, {"steps": steps, "epochs": None}))


def change_training(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with fields of its section training changed to values that are right by construction."""
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=dict(changes))})


def _check_names(study: Study, *, source: str) -> None:
    """Raises ConfigError for a name that is there twice, or that leads nowhere."""
    names, plans = [arm.name for arm in study.arms], list(study.measure.plans)
    temperatures = [f"{temperature:g}" for temperature in study.measure.temperatures]
    for key, given in (
        ("arms.name", names),
        ("measure.plans", plans),
        ("measure.temperatures", temperatures),
        ("study.seeds", [str(seed) for seed in study.study.seeds]),
    ):
        twice = [each for each in given if given.count(each) > 1]
        if twice:
            raise ConfigError(f"{source}: {key}: found {twice[0]} twice, expected each once")
    wanted = [("study.baseline", study.study.baseline, names)]
    if (pair := study.pair) is not None:
        others = [name for name in names if name != study.study.baseline and name not in TAKEN]
        wanted += [("pair.arm", pair.arm, others), ("pair.plan", pair.plan, plans)]
        wanted += [("pair.temperature", f"{pair.temperature:g}", temperatures)]
    for key, found, known in wanted:
        if found not in known:
            raise ConfigError(
                f"{source}: {key}: found {found}, expected one of the study; {suggestion(found, known=known)}"
            )


def _cell(study: Study, arm: ArmSection, seed: int) -> Cell:
    equal = arm.equal or study.budget.equal
    if arm.draft is not None:
        extra = [key for key in ("set", "recipe", "warm_start", "equal") if key in arm.model_fields_set]
        if extra:
            raise ConfigError(f"arm {arm.name} has a finished draft, so {extra[0]} changes nothing; leave it out")
        return Cell(arm.name, seed, None, None, arm.draft, "tokens")
    start = study.study.warm_start if arm.warm_start is None else arm.warm_start
    try:
        recipe = load_recipe(
            arm.recipe or study.study.recipe, overrides=[*study.study.set, *arm.set, f"training.seed={seed}"]
        )
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name}: {error}") from error
    return Cell(arm.name, seed, recipe, None if start == SCRATCH else start, None, equal)


def _check_shared(cell: Cell, baseline: Recipe) -> None:
    """Raises ConfigError when a cell sees other batches than the baseline."""
    assert cell.recipe is not None
    for section, names in (("training", SHARED), ("data", sorted(type(baseline.data).model_fields))):
        ours, theirs = (recipe.model_dump()[section] for recipe in (cell.recipe, baseline))
        for name in names:
            if name != "features" and ours[name] != theirs[name]:  # drafts may read other states of the same rows
                raise ConfigError(
                    f"arm {cell.arm} has {section}.{name} = {ours[name]}, the baseline {theirs[name]}; expected the "
                    "same batches and steps for all arms: set it for the whole study"
                )
