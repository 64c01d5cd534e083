"""A draft on disk: a folder with its weights, what they are for, the recipe that made them and who ran it.

    draft.safetensors   the weights, the draft vocabulary's map among them
    draft.toml          which draft, its configuration, its vocabulary and its target; sha256 of the other files
    tokens.json.gz      names of the target's tokens, to refuse a foreign tokenizer by name
    recipe.toml         the recipe, if it was trained by one
    manifest.json       who made it

Strict both ways: a tensor that is missing, unexpected, of another shape, NaN or infinite is an error that names it.
The folder is written aside and renamed, so that it is whole or absent.  This module knows no training.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline import __version__
from paceline.config import Recipe, dump_recipe
from paceline.drafts._base import DraftConfig, DraftNetwork, DraftPlugin
from paceline.drafts._loaded import DraftInfo, LoadedDraft
from paceline.errors import CheckpointError, ConfigError
from paceline.machine import check_device
from paceline.ops.vocab import DraftVocab
from paceline.records import TargetIdentity
from paceline.store.draft_facts import FACTS, FORMAT, TOKENS, WEIGHTS, DraftFacts, read_config, read_facts, read_tokens
from paceline.store.draft_names import find_draft
from paceline.store.files import folder_aside, sha256_file
from paceline.store.fingerprint import identify_target
from paceline.store.manifest import Manifest
from paceline.store.weights import check_finite, fill_module, read_tensors, refuse_full_disk, write_tensors
from paceline.targets.generic import Target
from paceline.toml import to_toml

RECIPE, MANIFEST = "recipe.toml", "manifest.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAP = ("d2t", "t2d")  # names of the draft vocabulary's two tables in the weights of every draft


def save_draft(
    folder: Path | str,
    draft: DraftNetwork,
    *,
    info: DraftInfo,
    dtype: str = "float32",
    recipe: Recipe | None = None,
    manifest: Manifest | None = None,
) -> None:
    """Write a draft's folder, whole or not at all; one that is there is replaced.

    dtype: "float32" or "bfloat16", of the floating-point weights on disk.
    Raises CheckpointError naming the tensors that hold NaN or infinity: such a draft is never saved; and when the disk
    is full, in which case the folder stays as it was.
    """
    tensors = {name: _cast(tensor, DTYPES[dtype]) for name, tensor in draft.state_dict().items()}
    check_finite(tensors, where=f"draft {info.name}, not saved")
    path = Path(folder)
    with refuse_full_disk(path), folder_aside(path) as aside:
        write_tensors(aside / WEIGHTS, tensors)
        (aside / TOKENS).write_bytes(gzip.compress(json.dumps(info.target.tokens).encode(), mtime=0))
        if recipe is not None:
            (aside / RECIPE).write_text(dump_recipe(recipe), "utf-8")
        if manifest is not None:
            (aside / MANIFEST).write_text(json.dumps(manifest.as_dict(), indent=1) + "\n", "utf-8")
        digests = {file.name: sha256_file(file) for file in sorted(aside.iterdir())}
        (aside / FACTS).write_text(to_toml(_facts(draft, info, dtype=dtype, digests=digests)), "utf-8")


def read_info(folder: Path | str) -> DraftInfo:
    """What a draft's folder says of it, without its weights.

    folder: as in `find_draft`.  Raises CheckpointError naming the file at fault.
    """
    return _read(find_draft(folder))[0]


def load_draft(
    folder: Path | str,
    *,
    target: Target | PreTrainedModel | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    warn: Callable[[str], None] = print,
) -> LoadedDraft:
    """Read a draft: `generate` and `speculative` take what comes back as it is.

    folder: of the draft, or the name of one that comes with the package (`smollm2-eagle3`).
    target: with which it is going to work; a model of transformers brings no tokenizer to compare.  Refused are a
    tokenizer in which any of the draft's tokens has another id, and other sizes; other weights only cost acceptance,
    never exactness, and are told to `warn` in one line; further rows of the target's vocabulary (padding) are added to
    the draft's map, never to what it can say.
    dtype, device: of the weights in memory; None for the target's, float32 on the CPU without one.
    Raises CheckpointError that names the file and the tensors at fault, ConfigError for a wrong kind of argument.
    """
    fitted = None if target is None else _as_target(target)
    dtype = _as_dtype(dtype) or (torch.float32 if fitted is None else fitted.dtype)
    device = ("cpu" if fitted is None else fitted.device) if device is None else device
    check_device(device)
    path = find_draft(folder)
    info, facts, plugin = _read(path)
    tensors = read_tensors(path / WEIGHTS)
    where = str(path / WEIGHTS)
    vocab = _read_vocab(tensors, facts=facts, where=where)
    if fitted is not None:
        _check_target(info, fitted, vocab=vocab, where=str(path), warn=warn)
        vocab, config = _fit_vocab(vocab, info.config, target_size=fitted.vocab_size)
        info = dataclasses.replace(info, config=config)
    draft = _build(plugin, info, vocab, where=str(path / FACTS))
    own = {name: tensor for name, tensor in draft.state_dict().items() if name in MAP}
    fill_module(draft, {**{name: value for name, value in tensors.items() if name not in MAP}, **own}, where=where)
    return LoadedDraft(draft.to(device=device, dtype=dtype).eval(), info, facts.dtype)


def _as_target(given: object) -> Target:
    """A target as it is, and a transformers model as one.  Raises ConfigError."""
    if isinstance(given, Target):
        return given
    if isinstance(given, PreTrainedModel) and given.can_generate():
        return Target(given, name=given.name_or_path or "")
    raise ConfigError(
        f"target is a {type(given).__name__}; expected a paceline.Target, as load_target returns it, or a causal "
        "language model of transformers"
    )


def _as_dtype(given: object) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    raise ConfigError(f"dtype is {given!r}; expected one of torch's, such as torch.bfloat16, or None for the target's")


def _read(path: Path) -> tuple[DraftInfo, DraftFacts, DraftPlugin]:
    facts = read_facts(path)
    plugin, config = read_config(facts, path=path / FACTS)
    target = TargetIdentity(**facts.target.model_dump(), tokens=read_tokens(path / TOKENS))
    return DraftInfo(name=facts.draft, config=config, target=target, notes=facts.training), facts, plugin


def _build(plugin: DraftPlugin, info: DraftInfo, vocab: DraftVocab, *, where: str) -> DraftNetwork:
    """A fresh draft that reads what its target has.  Raises CheckpointError."""
    try:
        draft = plugin.build(info.config, vocab)
    except ConfigError as error:
        raise CheckpointError(f"{where}: config: {error}; restore the folder") from error
    assert isinstance(draft, DraftNetwork), "only drafts with weights are saved"
    misfit = draft.misfit(num_layers=info.target.num_layers, width=info.target.hidden_size)
    if misfit:
        raise CheckpointError(f"{where}: config: {misfit}; restore the folder")
    return draft


def _facts(draft: DraftNetwork, info: DraftInfo, *, dtype: str, digests: dict[str, str]) -> dict[str, Any]:
    target = dataclasses.asdict(info.target)
    del target["tokens"]
    return {
        "format": FORMAT,
        "draft": info.name,
        "paceline": __version__,
        "dtype": dtype,
        "num_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "vocabulary": {"size": draft.vocab.size, "target_size": draft.vocab.target_size},
        "target": target,
        "training": dict(info.notes),
        "config": info.config.model_dump(mode="json", exclude_none=True),
        "sha256": digests,
    }


def _read_vocab(tensors: dict[str, Tensor], *, facts: DraftFacts, where: str) -> DraftVocab:
    size, total = facts.vocabulary.size, facts.vocabulary.target_size
    absent = [name for name in MAP if name not in tensors]
    if size == total:
        if len(absent) < len(MAP):
            raise CheckpointError(f"{where}: unexpected d2t or t2d; {FACTS} says that the vocabulary is the whole one")
        return DraftVocab.full(total)
    if absent:
        raise CheckpointError(f"{where}: missing {', '.join(absent)}, the map of its {size} words; restore the folder")
    vocab = read_map(tensors, where=where)
    if (vocab.size, vocab.target_size) != (size, total):
        raise CheckpointError(
            f"{where}: a map of {vocab.size} of {vocab.target_size} words, {FACTS} says {size} of {total}"
        )
    return vocab


def read_map(tensors: Mapping[str, Tensor], *, where: str) -> DraftVocab:
    """The vocabulary that d2t and t2d describe.  where: how errors name the file.  Raises CheckpointError."""
    try:
        return DraftVocab.from_tables(tensors["d2t"], t2d=tensors["t2d"])
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _check_target(
    info: DraftInfo, target: Target, *, vocab: DraftVocab, where: str, warn: Callable[[str], None]
) -> None:
    theirs, ours = info.target, identify_target(target)
    if (ours.hidden_size, ours.num_layers) != (theirs.hidden_size, theirs.num_layers):
        raise CheckpointError(
            f"{where} was made for a target of {theirs.num_layers} layers of width {theirs.hidden_size} "
            f"({theirs.name}); {ours.name} has {ours.num_layers} of width {ours.hidden_size}: choose the draft's own"
        )
    for index, (known, found) in enumerate(zip(theirs.tokens, _padded(ours.tokens, len(theirs.tokens)), strict=False)):
        if ours.tokens and known is not None and known != found:
            raise CheckpointError(
                f"{where}: token {index} is {known!r} for the draft and {found!r} in the tokenizer of {ours.name}; "
                "expected one tokenizer: choose the draft's own target"
            )
    highest = int(vocab.ids[-1])  # sync
    if highest >= ours.vocab_size:
        raise CheckpointError(
            f"{where} can propose token {highest}, {ours.name} has ids 0 to {ours.vocab_size - 1}: "
            "choose the draft's own target"
        )
    if ours.digest != theirs.digest:
        warn(
            f"{where} was trained for another target ({theirs.name}, fingerprint {theirs.digest[:12]}; {ours.name} has "
            f"{ours.digest[:12]}): the text stays exact, fewer tokens will be accepted"
        )


def _padded(tokens: tuple[str | None, ...], length: int) -> tuple[str | None, ...]:
    return tokens + (None,) * (length - len(tokens))


def _fit_vocab(vocab: DraftVocab, config: DraftConfig, *, target_size: int) -> tuple[DraftVocab, DraftConfig]:
    """The same words, mapped into a target vocabulary with more or fewer padding rows."""
    if target_size == vocab.target_size:
        return vocab, config
    table = torch.zeros(target_size, dtype=torch.bool)
    table[vocab.ids] = True
    return DraftVocab.from_tables(vocab.d2t, t2d=table), config.model_copy(update={"vocab_size": target_size})


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def weights_sha256(draft: DraftNetwork) -> str:
    """sha256 (hex) of a draft's tensors, names included, to tell two drafts apart in a record."""
    digest = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        wide = tensor.detach().cpu().float() if tensor.is_floating_point() else tensor.detach().cpu().long()
        digest.update(name.encode() + str(list(tensor.shape)).encode() + wide.numpy().tobytes())
    return digest.hexdigest()
