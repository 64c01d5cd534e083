"""Published EAGLE-3 checkpoints: config.json and model.safetensors, as SGLang, vLLM and the EAGLE project read them.

Tensor names are our own draft's; layer ids and rotary keys are converted here and nowhere else.  Pickled weights are
refused, and nothing is guessed that a wrong guess would make silently slower: taps without ids follow the rule of the
published training (outputs of layers 1, L // 2 - 1 and L - 4).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from paceline.config import parse_section
from paceline.drafts import eagle3
from paceline.errors import CheckpointError, ConfigError, UnsupportedExport
from paceline.interop._base import Format
from paceline.ops.rotary import SETTINGS, RotarySpec
from paceline.ops.vocab import DraftVocab
from paceline.store.checkpoint import DTYPES, DraftInfo, LoadedDraft, read_map
from paceline.store.files import folder_aside
from paceline.store.fingerprint import identify_target
from paceline.store.weights import FLOATS, check_finite, fill_module, read_tensors, write_tensors
from paceline.targets.generic import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAP = ("d2t", "t2d")
# Copies of the target's embedding that some trainers save; the draft borrows the target's own.
IGNORED = {"embed_tokens.weight"}
# Variants of the network that this draft is not; a file that switches one on would load and propose nonsense.
OTHER_NETWORKS = ("fc_norm", "norm_before_residual", "norm_before_fc", "attention_output_gate")


Schema = TypeVar("Schema", bound=BaseModel)


class _Taps(BaseModel):
    """The part of a configuration that says what the draft reads; what else stands there is for servers."""

    model_config = ConfigDict(frozen=True)

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class _Published(_Taps):
    """What is read of config.json; a published one has many keys more, of subjects that are not a draft's."""

    num_hidden_layers: int = 1
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int = Field(ge=1)
    target_hidden_size: int | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    eagle_config: _Taps | None = None


def check(folder: Path) -> None:
    """Raises CheckpointError for a folder without a configuration that this format knows."""
    _read_config(folder)


def read(folder: Path, target: Target) -> LoadedDraft:
    """A published folder as a draft for `target`.  Raises CheckpointError naming file, keys or tensors at fault."""
    config = _read_config(folder)
    tensors = {name: tensor for name, tensor in _read_weights(folder).items() if name not in IGNORED}
    known = _parse(_Published, config, folder)
    vocab = _vocab(tensors, known.vocab_size, folder)
    sizes = _sizes(config, known, target, vocab, folder)
    draft = eagle3.build(sizes, vocab)
    assert isinstance(draft, eagle3.Eagle3)
    own = {name: value for name, value in draft.state_dict().items() if name in MAP}
    rest = {name: value.float() if value.dtype in FLOATS else value for name, value in tensors.items()}
    rest = {name: value for name, value in rest.items() if name not in MAP}
    fill_module(draft, {**rest, **own}, where=str(folder / WEIGHTS))
    info = DraftInfo("eagle3", sizes, identify_target(target), {"imported_from": "eagle"})
    kept = "bfloat16" if tensors["fc.weight"].dtype == torch.bfloat16 else "float32"
    return LoadedDraft(draft.eval(), info, kept)


def write(loaded: LoadedDraft, folder: Path) -> None:
    """A draft as a published folder, in the dtype that its own has; all is checked before the folder appears."""
    draft = loaded.draft
    if not isinstance(draft, eagle3.Eagle3):
        raise UnsupportedExport(f"format eagle holds eagle3 drafts; found {loaded.info.name}")
    state = draft.state_dict()
    dtype = DTYPES[loaded.dtype]
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    check_export(tensors, draft.config, where=str(folder))
    with folder_aside(folder) as aside:
        write_tensors(aside / WEIGHTS, tensors)
        text = json.dumps(
            foreign_config(draft.config, num_layers=loaded.info.target.num_layers, dtype=loaded.dtype), indent=2
        )
        (aside / CONFIG).write_text(text + "\n", "utf-8")


def check_export(tensors: dict[str, Tensor], config: eagle3.Eagle3Config, *, where: str) -> None:
    """Raises UnsupportedExport listing every tensor that is missing, unknown or of another shape than is published."""
    expected = expected_shapes(config)
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{name} is not part of the format" for name in tensors if name not in expected]
    faults += [
        f"{name} is {list(tensor.shape)}, expected {list(expected[name])}"
        for name, tensor in tensors.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if faults:
        raise UnsupportedExport(f"{where}: not written: {'; '.join(sorted(faults))}")
    check_finite(tensors, where=f"{where}: not written")


def expected_shapes(config: eagle3.Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a published EAGLE-3 file (one layer)."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "hidden_norm.weight": (width,),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, 2 * width),
        "self_attn.k_proj.weight": (keys, 2 * width),
        "self_attn.v_proj.weight": (keys, 2 * width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if config.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes["fc.weight"] = (width, len(config.taps) * config.target_hidden_size)
    shapes["norm.weight"] = (width,)
    shapes["lm_head.weight"] = (config.draft_vocab_size, width)
    if config.draft_vocab_size < config.vocab_size:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def foreign_config(config: eagle3.Eagle3Config, *, num_layers: int, dtype: str) -> dict[str, Any]:
    """config.json: flat and Llama-like; layer ids as servers count them, one more than ours (layer inputs)."""
    rotary = RotarySpec.from_settings(
        config.rope, head_dim=config.head_dim, max_positions=config.max_position_embeddings
    ).to_config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **rotary,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
            "use_aux_hidden_state": True,
        },
        "num_target_layers": num_layers,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; expected a published EAGLE-3 folder")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; expected a published EAGLE-3 configuration") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: found {json.dumps(config)[:40]}, expected an object with a draft's sizes")
    layers = _parse(_Published, config, folder).num_hidden_layers
    on = [key for key in OTHER_NETWORKS if config.get(key)]
    if on or layers != 1:
        what = f"{on[0]} is on" if on else f"{layers} layers"
        raise CheckpointError(f"{path}: {what}; expected the published one-layer EAGLE-3 network")
    return config


def _parse(schema: type[Schema], values: dict[str, Any], folder: Path) -> Schema:
    try:
        return parse_section(schema, table=values, source=str(folder / CONFIG))
    except ConfigError as error:
        raise CheckpointError(f"{error}; expected a published EAGLE-3 configuration") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file() and list(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder}: weights are pickled (.bin), which runs code when read; expected {WEIGHTS}: convert them first, "
            "where you trust them"
        )
    return read_tensors(folder / WEIGHTS)


def _vocab(tensors: dict[str, Tensor], size: int, folder: Path) -> DraftVocab:
    missing = [name for name in MAP if name not in tensors]
    if len(missing) == 1:
        raise CheckpointError(f"{folder / WEIGHTS}: {missing[0]} is missing; expected d2t and t2d, or neither")
    if missing:
        return DraftVocab.full(size)
    return read_map(tensors, where=str(folder / WEIGHTS))


def _sizes(
    config: dict[str, Any], known: _Published, target: Target, vocab: DraftVocab, folder: Path
) -> eagle3.Eagle3Config:
    heads = known.num_attention_heads
    inner = known.eagle_config.eagle_aux_hidden_state_layer_ids if known.eagle_config else None
    ids = inner if known.eagle_aux_hidden_state_layer_ids is None else known.eagle_aux_hidden_state_layer_ids
    as_named = {key: config[key] for key in ("intermediate_size", "rms_norm_eps") if key in config}
    values = {
        **as_named,
        "hidden_size": known.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if known.num_key_value_heads is None else known.num_key_value_heads,
        "head_dim": known.hidden_size // heads if known.head_dim is None else known.head_dim,
        "vocab_size": known.vocab_size,
        "draft_vocab_size": vocab.size,
        "target_hidden_size": target.hidden_size if known.target_hidden_size is None else known.target_hidden_size,
        "taps": eagle3.default_taps(target.num_layers) if ids is None else [index - 1 for index in ids],
        "max_position_embeddings": known.max_position_embeddings,
        "rope": {key: config[key] for key in SETTINGS if config.get(key) is not None},
        "attention_bias": known.attention_bias,
    }
    sizes = _parse(eagle3.Eagle3Config, values, folder)
    _check_target(sizes, target, folder)
    return sizes


def _check_target(sizes: eagle3.Eagle3Config, target: Target, folder: Path) -> None:
    found = (sizes.vocab_size, sizes.target_hidden_size)
    expected = (target.vocab_size, target.hidden_size)
    if found != expected or sizes.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{folder}: made for a target with vocabulary {found[0]} and width {found[1]}; {target.name} has "
            f"{expected[0]} and {expected[1]}"
        )
    bad = [tap for tap in sizes.taps if not 0 <= tap < target.num_layers]
    if bad:
        raise CheckpointError(
            f"{folder / CONFIG}: layer ids {[tap + 1 for tap in bad]} are not inputs of {target.name}'s layers"
        )


PLUGIN = Format(check=check, read=read, write=write)
