"""Published DFlash checkpoints: config.json and model.safetensors, as z-lab, SGLang and vLLM read them.

Tensor names are our own draft's and layer ids count outputs from 0, as ours do; only the configuration is translated.
A variant of the network (sliding windows, causal blocks, correctors behind the head) is refused by name, since its
weights would load and say nonsense.  Pickled weights are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from paceline.config import parse_section
from paceline.drafts import dflash
from paceline.errors import CheckpointError, ConfigError, UnsupportedExport
from paceline.interop._base import Format
from paceline.ops.rotary import SETTINGS, RotarySpec
from paceline.ops.vocab import DraftVocab
from paceline.store.checkpoint import DTYPES, DraftInfo, LoadedDraft
from paceline.store.files import folder_aside
from paceline.store.fingerprint import identify_target
from paceline.store.weights import check_finite, fill_module, read_tensors, write_tensors
from paceline.targets.generic import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
NETWORK = "DFlashDraftModel"
# Variants of the network that this draft is not, wherever a file switches them on.
OTHER_NETWORKS = (
    "attention_bias", "use_sliding_window", "use_swa", "causal", "attention_sink_bias", "projector_type",
    "markov_rank", "enable_confidence_head", "draft_vocab_size",
)  # fmt: skip

Schema = TypeVar("Schema", bound=BaseModel)


class _Block(BaseModel):
    """The nested part: what a block is and what the draft reads."""

    model_config = ConfigDict(frozen=True)

    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] | None = None
    block_size: int | None = None


class _Published(BaseModel):
    """What is read of config.json; a published one has many keys more, of subjects that are not a draft's."""

    model_config = ConfigDict(frozen=True)

    architectures: tuple[str, ...] = (NETWORK,)
    layer_types: tuple[str, ...] | None = None
    block_size: int | None = None
    dflash_config: _Block
    num_target_layers: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = None
    head_dim: int | None = None


def check(folder: Path) -> None:
    """Raises CheckpointError for a folder without a configuration that this format knows."""
    _read_config(folder)


def read(folder: Path, target: Target) -> LoadedDraft:
    """A published folder as a draft for `target`.  Raises CheckpointError naming file, keys or tensors at fault."""
    sizes = _sizes(folder, target)
    if not (folder / WEIGHTS).is_file() and list(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder}: weights are pickled (.bin), which runs code when read; expected {WEIGHTS}: convert them first, "
            "where you trust them"
        )
    tensors = read_tensors(folder / WEIGHTS)
    draft = dflash.build(sizes, DraftVocab.full(sizes.vocab_size))
    kept = "bfloat16" if tensors.get("fc.weight", torch.empty(0)).dtype == torch.bfloat16 else "float32"
    fill_module(draft, tensors, where=str(folder / WEIGHTS))
    info = DraftInfo("dflash", sizes, identify_target(target), {"imported_from": "dflash"})
    return LoadedDraft(draft.eval(), info, kept)


def write(loaded: LoadedDraft, folder: Path) -> None:
    """A draft as a published folder, in the dtype that its own has; all is checked before the folder appears."""
    draft = loaded.draft
    if not isinstance(draft, dflash.DFlash):
        raise UnsupportedExport(f"format dflash holds dflash drafts; found {loaded.info.name}")
    if not draft.vocab.is_full:
        raise UnsupportedExport(
            f"format dflash has no reduced vocabulary; the draft has {draft.vocab.size} of {draft.vocab.target_size} "
            "words: train it with the whole one"
        )
    if draft.config.attention_bias:
        raise UnsupportedExport(
            "format dflash has biases on all four projections of attention or on none; the draft has them on three: "
            "train it with draft.options.attention_bias = false"
        )
    tensors = {name: value.to(DTYPES[loaded.dtype]) for name, value in draft.state_dict().items()}
    check_finite(tensors, where=f"{folder}: not written")
    config = foreign_config(draft.config, num_layers=loaded.info.target.num_layers, dtype=loaded.dtype)
    with folder_aside(folder) as aside:
        write_tensors(aside / WEIGHTS, tensors)
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def foreign_config(config: dflash.DFlashConfig, *, num_layers: int, dtype: str) -> dict[str, Any]:
    """config.json, Qwen3-like; the block size stands in both places, since readers look in one of them."""
    rotary = RotarySpec.from_settings(
        config.rope, head_dim=config.head_dim, max_positions=config.max_position_embeddings
    ).to_config()
    layers = config.num_hidden_layers
    return {
        "architectures": [NETWORK],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **rotary,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
            "block_size": config.block_size,
        },
        "num_target_layers": num_layers,
    }


def _read_config(folder: Path) -> tuple[dict[str, Any], _Published]:
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; expected a published DFlash folder")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; expected a published DFlash configuration") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: found {json.dumps(config)[:40]}, expected an object with a draft's sizes")
    known = _parse(_Published, config, folder)
    nested = config["dflash_config"]
    on = [key for key in OTHER_NETWORKS if config.get(key) or nested.get(key)]
    on += sorted(set(known.layer_types or ()) - {"full_attention"})
    on += [name for name in known.architectures if name != NETWORK]
    if on:
        raise CheckpointError(f"{path}: {on[0]} is on; expected the plain DFlash network with full attention")
    return config, known


def _parse(schema: type[Schema], values: dict[str, Any], folder: Path) -> Schema:
    try:
        return parse_section(schema, table=values, source=str(folder / CONFIG))
    except ConfigError as error:
        raise CheckpointError(f"{error}; expected a published DFlash configuration") from error


def _sizes(folder: Path, target: Target) -> dflash.DFlashConfig:
    config, known = _read_config(folder)
    heads, block = known.num_attention_heads, known.dflash_config
    ids = block.target_layer_ids
    if ids is None:
        ids = dflash.default_taps(known.num_target_layers, count=known.num_hidden_layers)
    names = ("intermediate_size", "rms_norm_eps", "vocab_size", "max_position_embeddings")
    values = {
        **{key: config[key] for key in names if key in config},
        "block_size": _block_size(known, folder),
        "mask_token_id": block.mask_token_id,
        "num_hidden_layers": known.num_hidden_layers,
        "hidden_size": known.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if known.num_key_value_heads is None else known.num_key_value_heads,
        "head_dim": known.hidden_size // heads if known.head_dim is None else known.head_dim,
        "draft_vocab_size": config.get("vocab_size"),
        "taps": list(ids),
        "rope": {key: config[key] for key in SETTINGS if config.get(key) is not None},
    }
    sizes = _parse(dflash.DFlashConfig, values, folder)
    found = (sizes.vocab_size, sizes.hidden_size, known.num_target_layers)
    expected = (target.vocab_size, target.hidden_size, target.num_layers)
    if found != expected:
        raise CheckpointError(
            f"{folder}: made for a target with vocabulary {found[0]}, width {found[1]} and {found[2]} layers; "
            f"{target.name} has {expected[0]}, {expected[1]} and {expected[2]}"
        )
    bad = [tap for tap in sizes.taps if not 0 <= tap < target.num_layers]
    if bad:
        raise CheckpointError(f"{folder / CONFIG}: layer ids {bad} are not outputs of {target.name}'s layers")
    return sizes


def _block_size(known: _Published, folder: Path) -> int:
    """The block size of either place; both must agree."""
    given = [size for size in (known.block_size, known.dflash_config.block_size) if size is not None]
    if len(set(given)) != 1:
        found = f"block_size is {given[0]} and dflash_config.block_size {given[1]}" if given else "no block_size"
        raise CheckpointError(f"{folder / CONFIG}: {found}; expected one size of a block")
    return given[0]


PLUGIN = Format(check=check, read=read, write=write)
