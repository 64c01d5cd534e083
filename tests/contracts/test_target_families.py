"""Acceptance 7, 28 (K03, K21, K22, K24): each family scores trees exactly, or is refused by name when it is wrapped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import paceline
from fixtures_decoding import TREE, new_tokens, prompts
from fixtures_drafts import tiny_eagle3
from fixtures_models import bigram_model, random_table, tiny_llama
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import TargetError
from paceline.ops import tree
from paceline.targets import _trial
from paceline.targets.generic import Target

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, llama3 rope": (
        "Llama",
        {"rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 1e4,
        }},
    ),
    "mistral, window": ("Mistral", {"sliding_window": 6}),
    "mixtral, window": ("Mixtral", {"sliding_window": 6, "num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2, later layers slide": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "decoder_sparse_step": 1, **EXPERTS}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2, mixed, soft caps": ("Gemma2", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3_text, mixed": ("Gemma3Text", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, **MIXED}),
    "smollm3, no rope in some": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "phi3, window": ("Phi3", {"sliding_window": 6}),
    "olmo2": ("Olmo2", {}),
    "olmo3, mixed": ("Olmo3", {"sliding_window": 6, **MIXED}),
    "granite, scaled": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere2, mixed": ("Cohere2", {"sliding_window": 6, "head_dim": 8, **MIXED}),
    "starcoder2, window": ("Starcoder2", {"sliding_window": 6}),
    "gpt_oss, mixed, sinks": (
        "GptOss", {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    ),
    "glm4": ("Glm4", {"head_dim": 8}),
    "exaone4, mixed": ("Exaone4", {"sliding_window": 6, **MIXED}),
    "gpt2, learned positions": ("GPT2", {"n_positions": 128}),
    "gpt_neox": ("GPTNeoX", {}),
    "deepseek_v3, latent": ("DeepseekV3", LATENT),
}  # fmt: skip
FOREIGN = {("GPT2", "intermediate_size"), ("GPT2", "num_key_value_heads")}  # attributes that a real one lacks
PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def model_of(name: str, changes: dict[str, Any]) -> Any:
    short = name.removesuffix("Text") if name != "Llama4Text" else "Llama4"
    sizes = {key: value for key, value in SIZES.items() if (name, key) not in FOREIGN}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    kind = f"{short}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, kind if hasattr(transformers, kind) else f"{short}LMHeadModel")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.generation_config = GenerationConfig()
    return model


@functools.cache
def target_of(family: str) -> Target:
    return Target(model_of(*FAMILIES[family]), compile="off")


def logits_after(target: Target, ids: Tensor) -> Tensor:
    """[T, V]: a plain forward without a cache."""
    with torch.no_grad():
        return target.model(ids[None], use_cache=False).logits[0]


class Session:
    """Two rows of 11 and 7 tokens behind one prefill, and trees on them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(0, 64, (length,), generator=generator) for length in (11, 7)]
        self.cache = target.new_cache(2, capacity=40)
        self.first = target.prefill(self.cache, self.ids)

    def score(self, *, seed: int, parents: list[int] = PARENTS) -> tuple[Tensor, Any]:
        tokens = torch.randint(0, 64, (2, len(parents)), generator=torch.Generator().manual_seed(seed))
        mask = tree.ancestors(torch.tensor([parents] * 2))
        return tokens, self.target.score(self.cache, tokens, mask=mask, depths=mask.sum(dim=-1) - 1)

    def commit(self, tokens: Tensor, paths: list[list[int]]) -> None:
        self.cache.commit(paths)
        self.ids = [torch.cat([ids, row[path]]) for ids, row, path in zip(self.ids, tokens, paths, strict=True)]

    def assert_tree(self, tokens: Tensor, logits: Tensor, parents: list[int] = PARENTS) -> None:
        for row, ids in enumerate(self.ids):
            for node in range(len(parents)):
                path = tree.path(parents, node=node)
                want = logits_after(self.target, torch.cat([ids, tokens[row][path]]))[-1]
                torch.testing.assert_close(logits[row, node], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_scores_like_its_paths_and_continues_like_a_fresh_call(family: str) -> None:
    session = Session(target_of(family))
    for row, ids in enumerate(session.ids):
        want = logits_after(session.target, ids)[-1]
        torch.testing.assert_close(session.first.logits[row, 0], want, atol=1e-5, rtol=1e-5)
    tokens, scores = session.score(seed=1)
    session.assert_tree(tokens, scores.logits)
    session.commit(tokens, [[0, 2, 5], [0, 1, 3, 6]])
    assert session.cache.lengths == [14, 11]
    tokens, scores = session.score(seed=2, parents=[-1, 0, 1, 0])
    session.assert_tree(tokens, scores.logits, [-1, 0, 1, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_nodes_leave_no_trace(family: str) -> None:
    rounds = []
    for seed in (3, 4):
        session = Session(target_of(family))
        tokens, _ = session.score(seed=seed)
        session.commit(tokens.fill_(9), [[], []])  # nothing is kept
        rounds.append(session.score(seed=5)[1].logits)
    assert torch.equal(rounds[0], rounds[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_hidden_states_of_the_next_index(family: str) -> None:
    target = target_of(family)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        states = target.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        logits = target.model(input_ids=ids, use_cache=False).logits
    last = target.num_layers  # its entry in hidden_states is behind the final norm, and so is that tap
    target.set_taps((0, 1, 2, last))
    try:
        whole = target.full_forward(ids)
        cached = target.prefill(target.new_cache(2, capacity=16), list(ids))
    finally:
        target.set_taps(())
    assert len(states) == target.num_layers + 1
    assert whole.taps is not None and cached.taps is not None and whole.hidden is not None
    assert torch.equal(whole.taps, torch.cat([*states[1:4], states[last]], dim=-1))
    assert torch.equal(whole.taps[..., -target.hidden_size :], whole.hidden)
    torch.testing.assert_close(cached.taps, whole.taps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.head(whole.hidden), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_identical(family: str) -> None:
    target = target_of(family)
    want = [new_tokens(target.model, prompt, max_new_tokens=12) for prompt in prompts(2)]
    for draft in (None, Ngram(NgramConfig())):
        result = paceline.generate(target, prompts(2), draft=draft, plan=TREE, max_new_tokens=12)
        assert [row.tokens for row in result.rows] == want


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_have_a_draft_of_its_own(family: str) -> None:
    target = target_of(family)
    want = [new_tokens(target.model, prompt, max_new_tokens=8) for prompt in prompts(2)]
    result = paceline.generate(target, prompts(2), draft=tiny_eagle3(target), plan=TREE, max_new_tokens=8)
    assert [row.tokens for row in result.rows] == want
    assert result.stats.total.rounds > 0


def test_every_family_that_is_called_proven_is_tested_here() -> None:
    tested = {target_of(family).model.config.get_text_config().model_type for family in FAMILIES}
    assert tested == _trial.PROVEN


def test_learned_positions_end_where_they_end() -> None:
    model = model_of("GPT2", {"n_positions": 24, "max_position_embeddings": 24})
    prompt = prompts(1)[0] * 4
    want = new_tokens(model, prompt, max_length=24)
    own = Target(model, compile="off")
    for draft in (None, Ngram(NgramConfig())):
        assert paceline.generate(own, prompt, draft=draft, plan=TREE, max_length=24).rows[0].tokens == want


HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "RecurrentGemma": {"head_dim": 8, "lru_width": 32, "attention_window_size": 8},
    "Lfm2": {"full_attn_idxs": [1]},
    "FalconH1": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64, "head_dim": 8,
    },
    "Llama4Text": {
        "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 8,
    },
    "Bloom": {},
    "GPTNeo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4},
    "Falcon": {"alibi": True},
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_cannot_be_rolled_back_or_masked_is_refused_by_name(name: str) -> None:
    build = model_of_old if name in ("Bloom", "GPTNeo", "Falcon", "Mpt") else model_of
    model = build(name, HYBRIDS[name])
    with pytest.raises(TargetError, match=type(model).__name__) as caught:
        Target(model)
    assert "\n" not in str(caught.value)
    assert "choose" in str(caught.value)


def model_of_old(name: str, changes: dict[str, Any]) -> Any:
    """Families whose configurations spell the sizes in their own way."""
    kept = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    sizes = {key: SIZES[key] for key in kept}
    if name in ("Bloom", "Falcon"):
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    ).eval()


def test_kernels_that_take_no_tree_mask_are_refused() -> None:
    model = tiny_llama(layers=1)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TargetError, match=r"flash_attention_2.*sdpa"):
        Target(model)


class Stubborn(LlamaForCausalLM):
    """A family that counts its own positions, as those do that derive them from a padding mask."""

    @functools.wraps(LlamaForCausalLM.forward)  # its signature says how this transformers spells the cache
    def forward(self, *args: Any, position_ids: Any = None, **arguments: Any) -> Any:
        return super().forward(*args, **arguments)


class Honest(LlamaForCausalLM):
    """A family that nobody has heard of."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_unheard_family_has_to_stand_a_trial(dtype: torch.dtype) -> None:
    config = LlamaConfig(**SIZES, initializer_range=0.35)
    config.model_type = "unheard"
    torch.manual_seed(0)
    target = Target(Honest(config).to(dtype))
    assert target.taps == ()
    with pytest.raises(TargetError, match=r"Stubborn \(unheard\) scores a tree otherwise"):
        Target(Stubborn(config).to(dtype))


def test_a_trial_allows_for_a_family_that_looks_at_the_last_token_only() -> None:
    model = bigram_model(random_table(64, seed=3))
    model.config.model_type = "unheard"
    assert Target(model).vocab_size == 64
