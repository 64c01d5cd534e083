"""What a target tells those who build drafts for it: sizes, rotary settings, ids that must never be left out.

It reads configurations and tokenizers and knows no draft.
"""

from __future__ import annotations

from typing import Any

from paceline.ops.rotary import SETTINGS
from paceline.records import TargetFacts
from paceline.targets._transformers import text_config

INNER_SIZES = ("intermediate_size", "ffn_dim", "n_inner")  # GPT-2 leaves its own out: four times the hidden size


def facts_of(model: Any, tokenizer: Any = None) -> TargetFacts:
    """The facts of a loaded causal language model; special ids need a tokenizer or a generation configuration."""
    config = text_config(model)
    values = config.to_dict()
    heads = config.num_attention_heads
    return TargetFacts(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=next((values[name] for name in INNER_SIZES if values.get(name)), 4 * config.hidden_size),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or config.hidden_size // heads,
        rms_norm_eps=values.get("rms_norm_eps") or 1e-6,
        max_positions=values.get("max_position_embeddings") or 2048,
        rope=_rope(values),
        special_ids=special_ids(model, tokenizer),
    )


def _rope(values: dict[str, Any]) -> dict[str, object]:
    """Rotary settings; of a family with one entry for each kind of layer, those of the layers with full attention.

    An entry of a kind that no layer has is a default that nothing uses, and counts only where no other is left.
    """
    found: dict[str, Any] = {key: values[key] for key in SETTINGS if values.get(key) is not None}
    entries: dict[str, Any] = found.get("rope_parameters") or {}
    kinds = {kind: entry for kind, entry in entries.items() if isinstance(entry, dict)}
    if kinds:
        kinds = {kind: kinds[kind] for kind in kinds if kind in (values.get("layer_types") or kinds)} or kinds
        found["rope_parameters"] = kinds.get("full_attention") or next(iter(kinds.values()))
        found.pop("rope_theta", None)  # where it is kept beside the entries it belongs to one kind of layer only
    return found


def special_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end or frame a text: the generation configuration's ends, and the tokenizer's special tokens."""
    ids: set[int] = set()
    for source in (model.generation_config, text_config(model)):
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            value = getattr(source, name, None)
            ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    if tokenizer is not None:
        ids.update(tokenizer.all_special_ids)
    size = text_config(model).vocab_size
    return tuple(sorted(token for token in ids if 0 <= token < size))
