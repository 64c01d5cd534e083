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
        unsaid_ids=unsaid_ids(model, tokenizer),
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


def unsaid_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that no text of the target holds, the fittest first; () without a tokenizer, which alone could tell.

    The tokenizer's mask token; rows of the embedding without a token, lowest first; special tokens without a role that
    the chat template does not write; a padding token that is nothing else.  A row of zeros is left out: attention
    could not tell one such place from another.
    """
    if tokenizer is None:
        return ()
    size = text_config(model).vocab_size
    known = set(tokenizer.get_vocab().values())
    framing = set(special_ids(model, tokenizer))
    template = str(getattr(tokenizer, "chat_template", None) or "")
    spare = [
        token
        for token, entry in sorted(tokenizer.added_tokens_decoder.items())
        if entry.special and token not in framing and entry.content not in template
    ]
    pad = tokenizer.pad_token_id
    other_roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, *_ends(model)}
    candidates = [
        *([] if getattr(tokenizer, "mask_token_id", None) is None else [tokenizer.mask_token_id]),
        *(token for token in range(size) if token not in known),
        *spare,
        *([] if pad is None or pad in other_roles else [pad]),
    ]
    rows = model.get_input_embeddings().weight
    return tuple(token for token in dict.fromkeys(candidates) if token < size and bool(rows[token].any()))


def _ends(model: Any) -> set[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return set(ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends])
