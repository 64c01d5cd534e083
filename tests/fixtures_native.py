"""Tiny random models of the families that the native forward knows, with biases and norms that are not trivial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.targets.generic import Target

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def family(name: str, **changes: Any) -> Any:
    """A model in evaluation mode; the norms' weights and the biases are random too."""
    torch.manual_seed(0)
    model_class, config_class, fields = FAMILIES[name]
    model = model_class(config_class(**{**SIZES, **fields, **changes})).eval()
    model.generation_config = GenerationConfig()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model.requires_grad_(False)


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "one-key-head": (
        LlamaForCausalLM, LlamaConfig,
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 48},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2": (
        Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 4, "head_dim": 80}),
}  # fmt: skip


def tree(parents: list[int]) -> tuple[Tensor, Tensor]:
    """Mask [N, N] bool and depths [N] int64 of a tree given by its nodes' parents, the root's being -1."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    depths = torch.zeros(len(parents), dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
            depths[node] = depths[parent] + 1
    return mask, depths


def random_tree(count: int, *, generator: torch.Generator) -> list[int]:
    """Parents of a random tree."""
    return [-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, count))]


def ids(*shape: int, generator: torch.Generator) -> Tensor:
    """Random token ids."""
    return torch.randint(0, VOCAB, shape, generator=generator)


def half(name: str, **changes: Any) -> Any:
    """A tiny bfloat16 model; its weights are small, so that 16 bits do not drown what is compared.

    Its heads are the narrowest that a machine of 16 lanes takes.
    """
    return family(name, **{"head_dim": 32, "initializer_range": 0.1, **changes}).to(torch.bfloat16)


def steps(target: Target, *, count: int = 4) -> list[Tensor]:
    """Prefill ragged rows, then score and commit single tokens; a row is rolled back on the way."""
    generator = torch.Generator().manual_seed(0)
    cache = target.new_cache(3, capacity=120)
    found = [target.prefill(cache, [ids(length, generator=generator) for length in (70, 2, 33)]).logits]
    for step in range(count):
        tokens = ids(3, 1, generator=generator)
        scores = target.score(
            cache, tokens, mask=torch.ones(3, 1, 1, dtype=torch.bool), depths=torch.zeros(3, 1, dtype=torch.int64)
        )
        found += [scores.logits] if scores.taps is None else [scores.logits, scores.taps]
        cache.commit([range(1), range(1), range(step % 2)])
    return found
