"""A recipe is data: TOML in, typed and frozen sections out, and back to the same TOML.

This module knows the shape of a recipe, not what a draft, an objective or a target does with it: those own a `Section`
of their own and have their `options` table parsed by `parse_section`. An unknown key is an error, never ignored.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails, to_jsonable_python

from paceline.errors import ConfigError
from paceline.plugins import suggestion
from paceline.toml import parse_toml, read_toml, to_toml


class Section(BaseModel):
    """Base of every configured thing: frozen; an unknown key is an error, and so is a NaN or infinite number."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


Beta = Annotated[float, Field(ge=0, lt=1)]
SHOWN = 200  # characters of a value that an error shows
MOST_EPOCHS = 1e9  # the number of steps has to fit a float
MOST_SEED = 2**63 - 1  # what every generator takes


class TargetSection(Section):
    """The frozen model that verifies."""

    name: str = "smollm2"  # a local folder, a Hub id or the name of an embedded target
    revision: str | None = None  # Hub branch, tag or commit; None = the default branch
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False  # code from the Hub runs only if the user asks for it


class DraftSection(Section):
    """The model that proposes."""

    name: str = "eagle3"  # a plug-in of drafts/, or a dotted module name
    vocab_size: int | None = Field(default=None, ge=1)  # tokens the draft can propose; None = the target's vocabulary
    init: Literal["target", "random"] = "target"  # whether its head starts as the target's
    options: dict[str, JsonValue] = {}  # parsed by the plug-in's own Config


class DataSection(Section):
    """Conversations to train on and to validate with."""

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    max_length: int = Field(default=1024, ge=3)  # tokens; longer conversations are cut, and reported
    max_rows: int | None = Field(default=None, ge=1)  # None = all
    answers: Literal["all", "last"] = "all"  # which assistant turns are supervised
    supervise: Literal["answers", "all"] = "answers"  # all: every token, since the target has a law for prompts too
    template_options: dict[str, JsonValue] = {}  # handed to the chat template, for example enable_thinking
    features: str | None = None  # folder written by `paceline capture`; None = the target runs online


class ObjectiveSection(Section):
    """What the draft is trained for."""

    name: str = "ttt"  # a plug-in of training/objectives/, or a dotted module name
    options: dict[str, JsonValue] = {}  # parsed by the plug-in's own Config


class TrainingSection(Section):
    """How long, how fast and how often."""

    steps: int | None = Field(default=None, ge=1)  # optimiser steps; give this or epochs
    epochs: float | None = Field(default=None, gt=0, le=MOST_EPOCHS)
    tokens_per_batch: int = Field(default=4096, ge=1)  # tokens of one micro-batch, padding included
    accumulation: int = Field(default=1, ge=1)  # micro-batches in one optimiser step
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the layer's matrices; the head stays with AdamW
    learning_rate: float = Field(default=1e-4, gt=0)  # AdamW's peak
    muon_learning_rate: float = Field(default=0.02, gt=0)  # Muon's peak, on the same schedule
    warmup_steps: int = Field(default=100, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)  # the cosine ends at this share of learning_rate
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # EAGLE-3's AdamW
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.5, ge=0)  # 0 = off
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    threads: int | None = Field(default=None, ge=1)  # CPU threads; None = torch's choice
    save_every: int = Field(default=500, ge=1)  # optimiser steps
    validate_every: int = Field(default=500, ge=1)  # optimiser steps
    log_every: int = Field(default=10, ge=1)  # optimiser steps
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the drafts on disk; the state is always float32
    trackers: tuple[Literal["tensorboard"], ...] = ()  # beside the JSONL log, which is always written

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("exactly one of steps and epochs (`--set training.epochs=` takes it out)")
        return self


class ValidationSection(Section):
    """How the draft is judged while it trains: simulated accepted length."""

    prompts: int = Field(default=64, ge=1)  # conversations
    depth: int = Field(default=5, ge=1)  # drafted tokens in a simulated chain


class Recipe(Section):
    """One published run: everything that `paceline train` needs, and what a checkpoint carries."""

    target: TargetSection = TargetSection()
    draft: DraftSection = DraftSection()
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    training: TrainingSection
    validation: ValidationSection = ValidationSection()


SectionType = TypeVar("SectionType", bound=BaseModel)  # a Section, or a plug-in's own strict and frozen model


def load_recipe(path: str | Path, *, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.field=value` overrides.  Raises ConfigError, one line."""
    if not os.path.isfile(path):  # unlike Path's, it has an answer for a name that is too long
        raise ConfigError(f"{path}: no such recipe; expected a TOML file")
    return _recipe(read_toml(Path(path)), source=str(path), overrides=overrides)


def parse_recipe(text: str, *, source: str, overrides: Iterable[str] = ()) -> Recipe:
    """As `load_recipe`, from text.  source: how errors name it."""
    return _recipe(parse_toml(text, source=source), source=source, overrides=overrides)


def _recipe(table: dict[str, Any], *, source: str, overrides: Iterable[str]) -> Recipe:
    return parse_section(Recipe, table=apply_overrides(table, overrides=overrides, schema=Recipe), source=source)


def default_of(key: str) -> Any:
    """The default of a recipe's `section.field` as a plain JSON value; None for what is no field or has none."""
    section, _, name = key.partition(".")
    outer = Recipe.model_fields.get(section)
    annotation: Any = None if outer is None else outer.annotation
    if not (isinstance(annotation, type) and issubclass(annotation, Section)):
        return None
    field = annotation.model_fields.get(name)
    return None if field is None or field.is_required() else to_jsonable_python(field.default)


def dump_recipe(recipe: Section) -> str:
    """TOML text that `parse_recipe` reads back as an equal recipe; fields that are None are left out."""
    return to_toml(recipe.model_dump(mode="json", exclude_none=True))


def parse_section(
    schema: type[SectionType], *, table: Mapping[str, Any], source: str, prefix: tuple[str, ...] = ()
) -> SectionType:
    """Build a section from a table, strictly: `steps = "100"` is not a number.

    prefix: where the table stands in the recipe, for example ("draft", "options").
    Raises ConfigError: one line that names source, key, what was found and what was expected.
    """
    try:
        # Strict JSON rules fit TOML: arrays become tuples and 1 may stand for 1.0, but text is never a number.
        return schema.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error.errors(), schema=schema, prefix=prefix)}") from error


def check_options(schema: type[BaseModel], *, table: Mapping[str, Any], source: str, prefix: tuple[str, ...]) -> None:
    """Refuse what is wrong with the keys that are there, where what is absent will be filled in later.

    Arguments and errors as in `parse_section`.
    """
    try:
        schema.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["type"] != "missing"]
        if faults:
            raise ConfigError(f"{source}: {_explain(faults, schema=schema, prefix=prefix)}") from error


def apply_overrides(table: Mapping[str, Any], *, overrides: Iterable[str], schema: type[Section]) -> dict[str, Any]:
    """A copy of table with each `section.field=value` set; later ones win.

    The value is read as TOML (`1e-3`, `true`, `["a", "b"]`), except that a field that holds text takes it as it is; an
    empty one (`training.epochs=`) takes the key out, so that its default counts.
    """
    result = json.loads(json.dumps(table, default=str))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {override}: expected section.field=value, for example training.steps=100")
        place = result
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {override}: '{key}' is a value, not a section")
        if not text.strip():
            place.pop(keys[-1], None)
            continue
        place[keys[-1]] = text.strip() if _takes_text(schema, keys=keys) else _toml_value(text.strip())
    return result


def _toml_value(text: str) -> Any:
    """Read one TOML value; what is not TOML is text, so that quotes are rarely needed in a shell."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _takes_text(schema: type[Section], *, keys: list[str]) -> bool:
    """Whether the field that keys lead to holds text (str, a choice of words, or None)."""
    field = schema.model_fields.get(keys[0])
    if field is None:
        return False
    annotation: Any = field.annotation
    if len(keys) > 1:
        return (
            isinstance(annotation, type) and issubclass(annotation, Section) and _takes_text(annotation, keys=keys[1:])
        )
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words = (get_args(choice) if get_origin(choice) is Literal else (choice,) for choice in choices)
    return all(word is str or word is type(None) or isinstance(word, str) for group in words for word in group)


def _explain(faults: list[ErrorDetails], *, schema: type[BaseModel], prefix: tuple[str, ...]) -> str:
    """The first fault in full, and how many more there are."""
    fault = faults[0]
    key = ".".join(str(part) for part in (*prefix, *fault["loc"])) or "the recipe"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "extra_forbidden":
        return (
            f"{key}: unknown key; {suggestion(str(fault['loc'][-1]), known=_keys(schema, loc=fault['loc'][:-1]))}{more}"
        )
    if fault["type"] == "missing":
        inside = _keys(schema, loc=fault["loc"])
        return (
            f"{key}: missing; expected {'a section with some of: ' + ', '.join(inside) if inside else 'a value'}{more}"
        )
    # Our own validators raise ValueError with what was expected; pydantic's texts start with "Input should be".
    expected = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ").replace("'", '"')
    return f"{key}: found {_found(fault['input'])}, expected {expected}{more}"


def _found(value: Any) -> str:
    """What the user wrote, on one line."""
    if isinstance(value, Mapping):
        text = ", ".join(f"{name} = {_found(item)}" for name, item in value.items()) or "an empty section"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."


def _keys(schema: type[BaseModel], *, loc: tuple[int | str, ...]) -> list[str]:
    """Keys of the section that a path leads to; none if the path leads elsewhere."""
    for key in loc:
        if isinstance(key, int):  # a section of a list of them
            continue
        field = schema.model_fields.get(key)
        inner = _section_in(field.annotation) if field is not None else None
        if inner is None:
            return []
        schema = inner
    return sorted(schema.model_fields)


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds: alone, in a list, or where it may be left out."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None
