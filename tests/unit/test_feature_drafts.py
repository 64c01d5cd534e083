"""EAGLE-1/2 and GRIFFIN networks against their published formulas, and the head that they borrow."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from fixtures_drafts import FEATURE, max_difference, tiny_draft
from fixtures_models import make_target, tiny_llama
from paceline.cache import KVCache
from paceline.decoding.binding import make_proposer
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.sampling import DraftSampling
from paceline.drafts import eagle2, griffin
from paceline.errors import ConfigError
from paceline.ops.vocab import DraftVocab
from paceline.targets._facts import facts_of

LAYER = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"} | {
    f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
} | {"layers.0.post_attention_layernorm.weight"}  # fmt: skip
FUSION = {
    "fc.fc.weight", "fc.fc.bias", "fc.mlp.input_layernorm.weight", "fc.mlp.up_proj.weight", "fc.mlp.down_proj.weight",
    "fc.post_attention_layernorm.weight",
}  # fmt: skip
NAMES = {"eagle2": LAYER | {"fc.weight", "fc.bias"}, "griffin": LAYER | FUSION}


def lender(weight, *, factor=1.0, cap=None, bias=None):
    return SimpleNamespace(head_weight=weight, head_scale=(factor, cap), head_bias=bias)


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def published(name, draft, config, embeds, features):
    """(what the head reads, what goes on), computed with transformers' attention over a whole text."""
    weights = dict(draft.named_parameters())
    both = torch.cat([embeds, features], dim=-1)
    if name == "eagle2":
        x = both @ weights["fc.weight"].T + weights["fc.bias"]
    else:
        x = both @ weights["fc.fc.weight"].T + weights["fc.fc.bias"]
        own = weights["fc.mlp.input_layernorm.weight"]
        state = norm(norm(x, weights["fc.post_attention_layernorm.weight"]), own)
        up = torch.cat([state, norm(embeds, own)], dim=-1) @ weights["fc.mlp.up_proj.weight"].T
        x = x + torch.nn.functional.silu(up) @ weights["fc.mlp.down_proj.weight"].T
    attention = LlamaAttention(config, 0)
    attention.load_state_dict(draft.attention.state_dict())
    count = x.shape[1]
    table = LlamaRotaryEmbedding(config)(x, torch.arange(count)[None])
    causal = torch.full((count, count), -torch.inf).triu(1)[None, None]
    x = x + attention(x, position_embeddings=table, attention_mask=causal)[0]
    mlp = {key.rpartition("mlp.")[2]: value for key, value in weights.items() if key.startswith("layers.0.mlp.")}
    inner = norm(x, weights["layers.0.post_attention_layernorm.weight"])
    inner = torch.nn.functional.silu(inner @ mlp["gate_proj.weight"].T) * (inner @ mlp["up_proj.weight"].T)
    out = inner @ mlp["down_proj.weight"].T
    return (x + out,) * 2 if name == "eagle2" else tuple(x + half for half in out.chunk(2, dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("name", FEATURE)
def test_the_network_is_the_published_one(name):
    model = tiny_llama()
    draft = tiny_draft(name, make_target(model), scale=0.3)
    for key, weight in draft.named_parameters():
        if "norm" in key:
            weight.uniform_(0.5, 1.5)
    embeds, features = torch.randn(2, 1, 6, 32).unbind()
    model.config._attn_implementation = "eager"
    predict, regress = published(name, draft, model.config, embeds, features)
    cache = KVCache(1, capacity=8)
    cache.place(torch.arange(6)[None], view=6, start=0)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    hidden = draft.level(embeds, features, positions=torch.arange(6)[None], visible=causal, cache=cache)
    assert max_difference(draft.head_input(hidden), predict) < 1e-4
    assert max_difference(draft.onward(hidden), regress) < 1e-4
    assert max_difference(draft.logits(hidden), model.lm_head(predict)) < 1e-3
    assert (max_difference(predict, regress) > 0.1) == (name == "griffin")


@pytest.mark.parametrize("name", FEATURE)
def test_tensors_are_named_as_published(name):
    draft = tiny_draft(name, make_target(tiny_llama()))
    assert draft.state_dict().keys() == NAMES[name]
    assert draft.layer.mlp.down_proj.weight.shape == ((64, 64) if name == "griffin" else (32, 64))
    assert tiny_draft(name, make_target(tiny_llama()), words=20).state_dict().keys() == NAMES[name] | {"d2t", "t2d"}


def test_biases_by_option():
    facts = facts_of(tiny_llama())
    draft = eagle2.build(eagle2.configure(facts, {"bias": False, "attention_bias": True}), DraftVocab.full(64))
    biases = {name for name in draft.state_dict() if name.endswith("bias")}
    assert biases == {f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    with pytest.raises(ConfigError, match=r"draft.options.bias: unknown key"):
        griffin.configure(facts, {"bias": False})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_num_layers": 3}, "draft.options.target_num_layers is 3; griffin works on the target's"),
        ({"hidden_size": 16}, "draft.options.hidden_size is 16"),
        ({"taps": [1]}, "draft.options.taps: unknown key"),
    ],
)
def test_what_only_the_target_can_say_is_refused(options, said):
    with pytest.raises(ConfigError) as error:
        griffin.configure(facts_of(tiny_llama()), options)
    assert said in str(error.value)


@pytest.mark.parametrize("words", [None, 20])
def test_the_borrowed_head_is_the_targets_rows_times_its_factor(words):
    target = make_target(tiny_llama())
    draft = tiny_draft("eagle2", target, words=words)
    rows = target.head_weight[draft.vocab.ids]
    assert torch.equal(draft.head_weight, rows) and not draft.head_weight.requires_grad
    assert (draft.head_weight.data_ptr() == target.head_weight.data_ptr()) == (words is None)
    draft.borrow(lender(target.head_weight, factor=0.25))
    assert torch.equal(draft.head_weight, rows * 0.25)
    assert "head" not in draft.state_dict()


def test_a_head_is_lent_anew_only_where_something_changed():
    target, other = make_target(tiny_llama()), make_target(tiny_llama(seed=1))
    draft = tiny_draft("griffin", target, words=20)
    ids, first = draft.vocab.ids, draft.head_weight
    draft.borrow(target)
    assert draft.head_weight is first
    draft.borrow(other)
    assert torch.equal(draft.head_weight, other.head_weight[ids])
    draft.borrow(target)
    assert torch.equal(draft.head_weight, first)
    draft.to(torch.bfloat16)
    draft.borrow(target)
    assert torch.equal(draft.head_weight, first.bfloat16())
    draft.to(torch.float32)
    draft.borrow(other)
    draft.borrow(target)
    assert torch.equal(draft.head_weight, first)  # not what bfloat16 had left of it
    with torch.no_grad():
        target.head_weight.mul_(2.0)  # a target that is trained between two calls
    draft.borrow(target)
    assert torch.equal(draft.head_weight, first * 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda draft: pickle.loads(pickle.dumps(draft))])  # noqa: S301
def test_a_copy_decodes_and_borrows_for_itself(copied):
    target, other = make_target(tiny_llama()), make_target(tiny_llama(seed=1))
    draft = tiny_draft("eagle2", target)
    twin = copied(draft)
    assert torch.equal(twin.head_weight, draft.head_weight)
    twin.borrow(other)
    assert torch.equal(draft.head_weight, target.head_weight)
    assert torch.equal(twin.head_weight, other.head_weight)


def test_heads_that_are_more_than_a_matrix_are_refused_by_name():
    target = make_target(tiny_llama())
    draft = tiny_draft("eagle2", target)
    with pytest.raises(ConfigError, match=r"Eagle2 speaks .* caps its logits at 30.0; use a draft .* such as eagle3"):
        draft.borrow(lender(target.head_weight, cap=30.0))
    with pytest.raises(ConfigError, match="adds a bias to its logits"):
        draft.borrow(lender(target.head_weight, bias=torch.zeros(64)))


def test_a_draft_without_a_head_says_what_to_do():
    draft = eagle2.build(eagle2.configure(facts_of(tiny_llama()), {}), DraftVocab.full(64))
    with pytest.raises(ConfigError, match=r"call draft.borrow\(target\) first"):
        draft.logits(torch.zeros(1, 32))


def test_a_deeper_target_is_refused():
    draft = tiny_draft("eagle2", make_target(tiny_llama()))
    deeper = make_target(tiny_llama(layers=5))
    with pytest.raises(ConfigError, match=r"last hidden state of 4 layers of width 32; the target has 5 of width 32"):
        make_proposer(draft, deeper, plan=ProposalPlan.chain(2), sampling=DraftSampling())


@torch.no_grad()
@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("kind", [eagle2, griffin])
def test_a_start_from_the_target_guesses_a_feature_like_the_last_one(kind, size):
    draft = kind.build(kind.configure(facts_of(tiny_llama()), {}), DraftVocab.full(64))
    draft.initialise(torch.zeros(64, 32), tap_sizes=[size])
    features = torch.randn(1, 4, 32) * size
    inputs, residual = draft.enter(torch.randn(1, 4, 32) * 0.02, features)
    cos, sin = draft.tables(torch.arange(4)[None])
    queries = draft.attention.queries(inputs, cos=cos, sin=sin)
    keys, values = draft.attention.keys_values(inputs, cos=cos, sin=sin)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    guess = draft.onward(draft.finish(residual, draft.attention.attend(queries, keys, values, mask=causal)))
    assert float((guess - features).square().mean().sqrt()) < 0.3 * size + 0.02
