"""Tiny real models for tests: F1 bigram tables, F2 random Llama, F6 sliding window, and F3 scripted drafts.

Ordinary random models accept nothing that a lookup drafts, so overshoot and end-of-sequence faults would not show; the
bigram target's laws and paths are known in closed form instead (acceptance.md, Fixtures).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from paceline.targets.generic import Target

PERIOD = 13


def bigram_model(log_table: Tensor) -> LlamaForCausalLM:
    """F1: logits after token x are exactly log_table[x] ([V, V]); attention and MLP add nothing."""
    vocab = len(log_table)
    width = -(-vocab // 4) * 4
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, rms_norm_eps=1e-12, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, :vocab] = torch.eye(vocab)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :vocab] = log_table.T / width**0.5
    model.generation_config = GenerationConfig()
    return model


def cycle_table(vocab: int = 64) -> Tensor:
    """Log table of a deterministic path of period 13: 0 -> 1 -> ... -> 12 -> 0; every other id leads into it."""
    table = torch.zeros(vocab, vocab)
    for token in range(vocab):
        table[token, (token + 1) % PERIOD] = 12.0
    return table


def random_table(vocab: int, *, seed: int, scale: float = 1.5) -> Tensor:
    """A log table with random rows."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tiny_llama(*, layers: int = 4, seed: int = 0, vocab: int = 64, **changes: object) -> LlamaForCausalLM:
    """F2: hidden 32, 4 heads, 2 key heads; initializer_range 0.35, since small values give near ties."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.35,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()
    model.generation_config = GenerationConfig()
    return model


def tiny_mistral(*, window: int = 8, seed: int = 0) -> MistralForCausalLM:
    """F6: a sliding window of 8."""
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, max_position_embeddings=512, initializer_range=0.35,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    model.generation_config = GenerationConfig()
    return model


class Scripted:
    """F3: a lookup draft that says what a function of the context tells it to."""

    def __init__(self, script: Callable[[list[int], int], list[int]]) -> None:
        self.script = script

    def continuations(self, context: Sequence[int], *, length: int, count: int) -> list[list[int]]:
        """One candidate; with count > 1 a wrong sibling comes first at every level, so that trees are exercised."""
        true = self.script(list(context), length)
        if count == 1:
            return [true]
        decoys = [[*true[:depth], (true[depth] + 1) % 64] for depth in range(len(true))]
        return [*decoys[: count - 1], true]


class GreedyPaths:
    """The target's own next tokens, remembered: a proposal asks for them after every committed token."""

    AHEAD = 40

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], int] = {}

    def __call__(self, context: list[int], length: int) -> list[int]:
        """The next `length` greedy tokens after `context`."""
        path: list[int] = []
        while len(path) < length:
            here = (*context, *path)
            if here not in self.known:
                self._explore(list(here))
            path.append(self.known[here])
        return path

    def _explore(self, context: list[int]) -> None:
        ids = torch.tensor([context])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self.AHEAD)
        for end in range(len(context), out.shape[1]):
            self.known[tuple(out[0, :end].tolist())] = int(out[0, end])


def oracle(model: LlamaForCausalLM, *, paths: GreedyPaths | None = None) -> Scripted:
    """Everything is accepted.  paths: of this model, where several drafts share them."""
    return Scripted(paths or GreedyPaths(model))


def adversary(model: LlamaForCausalLM, *, paths: GreedyPaths | None = None) -> Scripted:
    """Nothing is accepted: the target's token + 1."""
    vocab, paths = model.config.vocab_size, paths or GreedyPaths(model)
    return Scripted(lambda context, length: [(paths(context, 1)[0] + 1) % vocab] * length)


def pattern(
    model: LlamaForCausalLM, runs: Sequence[int] = (3, 0, 1, 2), *, paths: GreedyPaths | None = None
) -> Scripted:
    """Exactly runs[i mod len] tokens are accepted in the i-th proposal after a context of any length."""
    vocab, paths = model.config.vocab_size, paths or GreedyPaths(model)

    def script(context: list[int], length: int) -> list[int]:
        right = runs[len(context) % len(runs)]
        path = paths(context, length)
        return [token if place < right else (token + 1) % vocab for place, token in enumerate(path)]

    return Scripted(script)


def make_target(model: object, **arguments: object) -> Target:
    """A target of a tiny model."""
    return Target(model, **arguments)  # type: ignore[arg-type]
