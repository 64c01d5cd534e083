"""What draft.toml and tokens.json.gz say; anything else in them is one line naming file and key.

A folder may come from anywhere, so nothing in it chooses what is imported.  This module knows no weights.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, field_validator

from paceline.config import Section, parse_section
from paceline.drafts._base import DraftConfig, DraftPlugin
from paceline.errors import CheckpointError, ConfigError
from paceline.plugins import known_plugin
from paceline.store.files import sha256_file
from paceline.toml import read_toml

FORMAT = 1
WEIGHTS, FACTS, TOKENS = "draft.safetensors", "draft.toml", "tokens.json.gz"


class VocabularyFacts(Section):
    """How many words the draft can say, of how many of the target's."""

    size: int = Field(ge=1)
    target_size: int = Field(ge=1)


class IdentityFacts(Section):
    """The target without the names of its tokens."""

    name: str
    digest: str
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)


class DraftFacts(Section):
    """draft.toml.  config: for the plug-in `draft` to read.  sha256: of every other file of the folder."""

    format: int
    draft: str
    paceline: str
    dtype: Literal["float32", "bfloat16"]
    num_parameters: int = Field(ge=0)
    vocabulary: VocabularyFacts
    target: IdentityFacts
    training: dict[str, JsonValue]
    config: dict[str, JsonValue]
    sha256: dict[str, str]

    @field_validator("sha256")
    @classmethod
    def _vouches(cls, digests: dict[str, str]) -> dict[str, str]:
        missing = [name for name in (WEIGHTS, TOKENS) if name not in digests]
        if missing:
            raise ValueError(f"the digest of {' and '.join(missing)} too")
        if any(Path(name).name != name for name in digests):
            raise ValueError("names of files in this folder")
        return digests


def read_facts(folder: Path) -> DraftFacts:
    """draft.toml, after checking that every other file is the one that it describes.  Raises CheckpointError."""
    path = folder / FACTS
    try:
        table = read_toml(path)
        found = table.get("format")
        if type(found) is not int or found != FORMAT:  # before the keys, which another format may have changed
            raise CheckpointError(
                f"{path}: format: found {found!r}, expected the number {FORMAT}; use the version that wrote it"
            )
        facts = parse_section(DraftFacts, table=table, source=str(path))
    except ConfigError as error:
        raise CheckpointError(f"{error}; restore the folder") from error
    for name, digest in facts.sha256.items():
        _check_file(folder / name, digest=digest)
    return facts


def read_config(facts: DraftFacts, *, path: Path) -> tuple[DraftPlugin, DraftConfig]:
    """The plug-in and the configuration that draft.toml names.

    path: of draft.toml, for errors.  A dotted name counts only if the program has imported that module itself.
    Raises CheckpointError.
    """
    try:
        plugin = known_plugin("drafts", name=facts.draft, kind=DraftPlugin)
    except ConfigError as error:
        raise CheckpointError(f"{path}: draft: {error}") from error
    if not plugin.has_weights:
        raise CheckpointError(
            f"{path}: draft: found '{facts.draft}', expected a draft with weights; restore the folder"
        )
    try:
        return plugin, parse_section(plugin.config, table=facts.config, source=str(path), prefix=("config",))
    except ConfigError as error:
        raise CheckpointError(f"{error}; restore the folder") from error


def read_tokens(path: Path) -> tuple[str | None, ...]:
    """The name of each token id, None for ids without one.  Raises CheckpointError naming the file."""
    try:
        tokens = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise CheckpointError(f"{path} is not a gzip file: {error}; restore the folder") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no JSON: {error}; restore the folder") from error
    if not isinstance(tokens, list):
        raise CheckpointError(f"{path} holds a {type(tokens).__name__}; expected a list of names: restore the folder")
    names: list[str | None] = []
    for index, name in enumerate(tokens):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if name is not None and not isinstance(name, str):
            raise CheckpointError(f"{path}: token {index} is {name!r}; expected text or null: restore the folder")
        names.append(name)
    return tuple(names)


def _check_file(path: Path, *, digest: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; restore the folder")
    found = sha256_file(path)
    if found != digest:
        raise CheckpointError(
            f"{path} is not the file that {FACTS} describes: sha256 {found[:12]}, expected {digest[:12]}; "
            "restore the folder"
        )
