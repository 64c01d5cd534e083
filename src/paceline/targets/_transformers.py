"""The one file that knows how transformers' versions differ (4.57 up to, not including, 6).

It knows no drafts and no trees: it finds the parts of a decoder-only model and spells one forward call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paceline.errors import TargetError

SLOT_BOUND = ("bloom", "mpt", "gpt_neo")  # ALiBi by slot; a local window cut by slot
LAYER_LISTS = ("layers", "h", "blocks")
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
RECURRENT_MARKS = ("linear_attention", "mamba", "recurrent", "conv", "rwkv", "chunked_attention", "compressed")


def cache_argument(model: nn.Module) -> str:
    """The keyword that takes the cache: `cache` where the model's forward declares it, else `past_key_values`."""
    declared = inspect.signature(model.forward).parameters
    return "cache" if "cache" in declared else "past_key_values"


def text_config(model: Any) -> Any:
    """The configuration of the text decoder (multimodal models nest it)."""
    return model.config.get_text_config(decoder=True)


def decoder(model: Any) -> Any:
    """The model without its head; 4.57 knows it for some families (GPT-2, GPT-NeoX) only as the base model."""
    found = model.get_decoder()
    return model.base_model if found is model else found


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model, in order."""
    stack = decoder(model)
    count = text_config(model).num_hidden_layers
    for name in LAYER_LISTS:
        layers = getattr(stack, name, None)
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            return layers
    raise TargetError(
        f"{type(model).__name__}: no list of {count} decoder layers found under {', '.join(LAYER_LISTS)}; "
        "give the family a file of its own in paceline/targets"
    )


def learned_positions(model: Any) -> int | None:
    """How many positions a model with learned position embeddings has; None for rotary ones, which do not end."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    words = model.get_input_embeddings()
    tables = (module for module in decoder(model).modules() if isinstance(module, nn.Embedding) and module is not words)
    # Some families keep two rows more than they have positions.
    return most if most is not None and any(0 <= table.num_embeddings - most <= 2 for table in tables) else None


def refuse_headless(model: Any) -> None:
    """Refuse what is no causal language model: a name, a tokenizer, a model without its output head."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        what = f"{type(model).__name__} {model!r}" if isinstance(model, str) else type(model).__name__
        raise TargetError(
            f"the target's model is {what}; expected a causal language model of transformers, such as "
            "AutoModelForCausalLM.from_pretrained(...), or use paceline.load_target(name)"
        )


def refuse_recurrent(model: Any) -> None:
    """Refuse, by name, a model whose state cannot be rolled back by forgetting rows of a key/value cache."""
    config = text_config(model)
    kinds = {str(kind) for name in LAYER_KINDS for kind in (getattr(config, name, None) or [])}
    bad = sorted(kind for kind in kinds if any(mark in kind for mark in RECURRENT_MARKS))
    stateful = bool(getattr(model, "_is_stateful", False))
    if bad or stateful or getattr(model.config, "is_encoder_decoder", False):
        what = f"layers of type {', '.join(bad)}" if bad else ("a recurrent state" if stateful else "an encoder")
        raise TargetError(
            f"{type(model).__name__} ({model.config.model_type}) has {what}, which cannot be rolled back to an "
            "accepted path; choose a decoder-only model with full or sliding-window attention"
        )


def refuse_own_masks(model: Any) -> None:
    """Refuse, by name, a model or a setting that would not attend as the 4-D mask and the positions of a tree say."""
    name, config = f"{type(model).__name__} ({model.config.model_type})", text_config(model)
    if config.model_type in SLOT_BOUND or bool(getattr(config, "alibi", False)):
        raise TargetError(
            f"{name} derives distances from where keys lie in the cache, so a tree's branches cannot be verified; "
            "choose a model with rotary or learned positions"
        )
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in (None, "eager", "sdpa"):
        raise TargetError(
            f"{name}: attn_implementation={kernel!r} takes no tree mask; load it with attn_implementation='sdpa'"
        )


def mask_kinds(model: Any) -> dict[str, int | None] | int | None:
    """Which masks the forward call takes.

    A dict {layer kind: window or None} for models that mix kinds, a window for models where every layer slides,
    None for full attention everywhere.
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window
    table = {kind: (window if kind == "sliding_attention" else None) for kind in set(kinds)}
    unknown = set(table) - {"full_attention", "sliding_attention"}
    if unknown:
        found = ", ".join(sorted(unknown))
        raise TargetError(f"{type(model).__name__} has layers of type {found}; expected full or sliding attention")
    if len(table) == 1:
        return next(iter(table.values()))
    return table


def attends_plainly(model: Any) -> bool:
    """Whether every layer attends to all that its mask shows, by transformers' own call of torch's kernel."""
    config = text_config(model)
    registry = vars(sys.modules[type(model).__module__]).get("ALL_ATTENTION_FUNCTIONS")
    # A family may have a registry of its own, and anyone may put another function under torch's name, at any time.
    is_own = registry is ALL_ATTENTION_FUNCTIONS and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    is_torch = getattr(config, "_attn_implementation", None) == "sdpa" and not config.sub_configs
    return is_own and is_torch and mask_kinds(model) is None


def head_scale(model: Any) -> tuple[float, float | None]:
    """(factor, soft cap) that the model applies to the output of its head."""
    config = text_config(model)
    factor = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        factor /= float(divisor)
    return factor, getattr(config, "final_logit_softcapping", None)


def layer_output(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What a decoder layer returns, bare (5.x) or first in a tuple (4.57, some families); of a decoder its states."""
    return output if isinstance(output, Tensor) else output[0]


def is_users_cache(cache: Any) -> bool:
    """Whether a cache handed to a custom decoding method came from the caller, and not from `generate` itself.

    5.x marks it; before, a cache that holds something or is not the default kind can only be the caller's.
    """
    if cache is None:
        return False
    marked = bool(getattr(cache, "_is_user_defined", False))
    return marked or type(cache) is not DynamicCache or cache.get_seq_length() > 0


def pad_token(config: GenerationConfig) -> int | None:
    """The id that `generate` puts behind a row that has ended; it falls back to an end token outside `pad_token_id`."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return config.pad_token_id if prepared is None else int(prepared)


def split_criteria(criteria: Iterable[Any]) -> tuple[set[int], int | None, list[Callable[..., Any]]]:
    """(end tokens, longest length or None, all other criteria)."""
    ends: set[int] = set()
    lengths: list[int] = []
    others: list[Callable[..., Any]] = []
    for entry in criteria:
        if type(entry) is EosTokenCriteria:
            ends.update(entry.eos_token_id.tolist())
        elif type(entry) is MaxLengthCriteria:
            lengths.append(entry.max_length)
        else:
            others.append(entry)
    return ends, min(lengths, default=None), others


def lost_argument(name: str) -> Any:
    """An argument of the `model.generate` call that called our caller.

    `generate` drops streamer and assistant_model when it hands over to a custom decoding method (4.57 to 5.24); None
    when the caller of our caller is anything else.
    """
    here = inspect.currentframe()
    caller = here.f_back.f_back if here is not None and here.f_back is not None else None
    if caller is None or caller.f_code is not inspect.unwrap(vars(GenerationMixin)["generate"]).__code__:
        return None
    return caller.f_locals.get(name)


def keep_tokenizer() -> None:
    """Put back the tokenizer that `generate` takes out of its arguments, and drops before it needs it for stop strings.

    4.57 to 5.24: `_extract_generation_mode_kwargs` first takes it out of `kwargs`, then asks for the signature of the
    custom method and looks up in `kwargs` what is named there.  Nothing happens when anybody else asks.
    """
    sorts = vars(GenerationMixin).get("_extract_generation_mode_kwargs")
    frame = inspect.currentframe()
    while frame is not None and (sorts is None or frame.f_code is not sorts.__code__):
        frame = frame.f_back
    if frame is not None:
        taken, left = frame.f_locals["generation_mode_kwargs"], frame.f_locals["kwargs"]
        left.update({name: value for name, value in taken.items() if name == "tokenizer"})
