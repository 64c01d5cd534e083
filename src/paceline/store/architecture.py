"""The architecture of a target without its weights and without the network: a model whose tensors have shapes only.

What it reads: a file of facts beside the recipes (`targets/*.toml`), for models that have to be asked for; else the
config.json of a folder or of the Hub's cache on this machine.  It knows no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.config import Section, TargetSection, parse_section
from paceline.errors import ConfigError, TargetError
from paceline.store.hub import find_target
from paceline.toml import read_toml

FACTS = "targets"  # folder of the files of facts, beside a recipe or one folder up


class ArchitectureFacts(Section):
    """A file of facts.  names: of the targets with this architecture.  source: where the numbers are published.

    config: as in the model's config.json, `model_type` among them.
    """

    names: tuple[str, ...]
    source: str
    config: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Architecture:
    """model: a causal language model on the meta device.  source: where its sizes were read."""

    model: Any
    source: str

    @property
    def num_parameters(self) -> int:
        """All weights, those that two places share once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_multiplied(self) -> int:
        """Weights that every token is multiplied with: all but the rows of the input embedding, of which it takes one.

        An output head that shares the embedding's rows multiplies with all of them.
        """
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        return self.num_parameters - (0 if embedding is head else embedding.numel())


def read_architecture(target: TargetSection, *, recipes: Sequence[Path] = ()) -> Architecture:
    """The architecture that a recipe's target has.

    recipes: files beside whose folder, or one folder up, a folder `targets` may hold files of facts.
    Raises ConfigError for a broken file of facts, TargetError where nothing says what the target is like.
    """
    for path in _facts_files(recipes):
        facts = parse_section(ArchitectureFacts, table=read_toml(path), source=str(path))
        if target.name in facts.names:
            return Architecture(_meta_model(_config(facts, path)), f"{path.name}, {facts.source}")
    place = find_target(target.name, revision=target.revision)
    try:
        config = AutoConfig.from_pretrained(
            place.location,
            revision=place.revision,
            local_files_only=True,
            trust_remote_code=target.trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"{target.name}: its architecture is not on this machine; expected a file of facts in a folder {FACTS}/ "
            "beside the recipe that names it, or its config.json in the Hub's cache"
        ) from error
    return Architecture(_meta_model(config), "its config.json")


def _facts_files(recipes: Sequence[Path]) -> list[Path]:
    folders = [folder / FACTS for recipe in recipes for folder in (recipe.parent, recipe.parent.parent)]
    return [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob("*.toml"))]


def _config(facts: ArchitectureFacts, path: Path) -> PretrainedConfig:
    values: dict[str, Any] = dict(facts.config)
    kind = values.pop("model_type", None)
    try:
        return AutoConfig.for_model(str(kind), **values)
    except ValueError as error:
        raise ConfigError(
            f'{path}: config.model_type: found {kind!r}, expected one that transformers knows, such as "llama"'
        ) from error


def _meta_model(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model
