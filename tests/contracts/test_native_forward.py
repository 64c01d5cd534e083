"""The native forward does what torch eager does, for every family, shape of call and set of instructions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from fixtures_native import FAMILIES, family, ids, random_tree, tree
from paceline.decoding.plan import ProposalPlan
from paceline.drafts.ngram import Ngram, NgramConfig
from paceline.errors import TargetError
from paceline.native.build import PORTABLE, TUNING, build_library
from paceline.native.library import Library
from paceline.targets.generic import Target

TUNINGS = {"native": TUNING, "portable": ((*PORTABLE, "-O1"),)}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each library is compiled once for this file, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield {name: Library(build_library(tuning=tuning)) for name, tuning in TUNINGS.items()}


def pair(name: str, library: Library | None = None, **changes: Any) -> tuple[Target, Target]:
    """(native, eager) targets of one model."""
    model = family(name, **changes)
    taps = (0, 2, model.config.num_hidden_layers, 2)  # the last hidden state among them
    native, eager = Target(model, taps=taps), Target(model, taps=taps, compile="off")
    assert (native.engine, eager.engine) == ("native", "eager")
    if library is not None:
        assert native._native is not None
        native._native.library = library
    return native, eager


def session(target: Target, *, seed: int = 0) -> list[Tensor]:
    """Prefill ragged rows, then score and commit random trees, chains and single nodes; everything that came out."""
    generator = torch.Generator().manual_seed(seed)
    cache = target.new_cache(3, capacity=80)
    scores = target.prefill(cache, [ids(length, generator=generator) for length in (2, 19, 33)])
    found = [scores.logits]
    for count in (9, 1, 4, 12):
        parents = random_tree(count, generator=generator) if count != 4 else [-1, 0, 1, 2]
        mask, depths = tree(parents)
        tokens = ids(3, count, generator=generator)
        wanted = torch.tensor([count - 1, 0]) if count == 9 else None
        scores = target.score(
            cache, tokens, mask=mask.expand(3, -1, -1), depths=depths.expand(3, -1), logit_rows=wanted
        )
        assert scores.taps is not None
        found += [scores.logits, scores.taps]
        path = mask[-1].nonzero().flatten().tolist()
        cache.commit([path, path[:1], []])
        if count == 1:
            cache.roll_back(1, length=cache.lengths[1] - 2)
    for buffers in (cache.keys, cache.values):
        found += [buffers[layer][row, :, :length] for layer in (0, 2) for row, length in enumerate(cache.lengths)]
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_agrees_with_eager(name: str, tuning: str, compiled: dict[str, Library]) -> None:
    native, eager = pair(name, compiled[tuning])
    for found, expected in zip(session(native), session(eager), strict=True):
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("own", [False, True], ids=["openmp", "std-thread"])
def test_threads_change_no_bit(threads: int, own: bool, compiled: dict[str, Library], monkeypatch: Any) -> None:
    target, _ = pair("qwen3", compiled["native"])
    alone = session(target)
    if own:
        monkeypatch.setattr(compiled["native"], "team", type(compiled["native"].team)(None, None, None))
    torch.set_num_threads(threads)
    try:
        together = session(target)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_node_has_the_same_bits_in_a_tree_in_a_chain_and_alone(name: str) -> None:
    """Greedy speculation then cannot differ from plain decoding even where two logits nearly tie."""
    target, _ = pair(name)
    generator = torch.Generator().manual_seed(3)
    prompt, parents = ids(13, generator=generator), [-1, 0, 0, 2, 2, 1, 4, 6, 7]
    mask, depths = tree(parents)
    tokens = ids(1, len(parents), generator=generator)

    def fresh() -> Any:
        cache = target.new_cache(1, capacity=64)
        target.prefill(cache, [prompt])
        return cache

    whole = target.score(fresh(), tokens, mask=mask[None], depths=depths[None])
    path = mask[-1].nonzero().flatten()
    chain_mask, chain_depths = tree(list(range(-1, len(path) - 1)))
    chain = target.score(fresh(), tokens[:, path], mask=chain_mask[None], depths=chain_depths[None])
    assert torch.equal(whole.logits[:, path], chain.logits)
    cache = fresh()
    one, zero = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
    for place, node in enumerate(path.tolist()):
        alone = target.score(cache, tokens[:, [node]], mask=one, depths=zero)
        assert torch.equal(alone.logits[:, 0], chain.logits[:, place])
        cache.commit([[0]])


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_transformers(name: str) -> None:
    target, _ = pair(name)
    prompts = [[5, 17, 3, 5, 17, 3, 5], [40, 2, 11]]
    result = paceline.generate(
        target, prompts, draft=Ngram(NgramConfig()), plan=ProposalPlan(depth=4, width=2, nodes=7), max_new_tokens=24
    )
    for row, prompt in zip(result.rows, prompts, strict=True):
        given = torch.tensor([prompt])
        out = target.model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=24)
        assert row.tokens == out[0, len(prompt) :].tolist()


def test_large_calls_and_small_ones_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    native, eager = pair("mistral")
    monkeypatch.setattr("paceline.targets.generic.NATIVE_ROWS", 30)  # the prefill is eager, the trees are native
    for found, expected in zip(session(native), session(eager), strict=True):
        assert distance(found, expected) < 1e-5


def test_weights_changed_in_place_are_used() -> None:
    native, eager = pair("llama")
    before = session(native)[0]
    native.model.model.layers[1].mlp.up_proj.weight.mul_(-1.5)
    native.model.load_state_dict({key: value * 1.01 for key, value in native.model.state_dict().items()})
    after = session(native)
    assert distance(after[0], before) > 1e-3
    assert all(distance(found, expected) < 1e-5 for found, expected in zip(after, session(eager), strict=True))


def replace_weight(model: Any) -> None:
    model.model.layers[2].self_attn.q_proj.weight = nn.Parameter(torch.randn(64 * 2, 64) * 0.1, requires_grad=False)


def replace_norm(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * 2


def slow_the_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def scale_the_scores(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


@pytest.mark.parametrize("change", [replace_weight, replace_norm, slow_the_rotation, scale_the_scores])
def test_weights_that_were_replaced_are_found(change: Callable[[Any], None]) -> None:
    native, eager = pair("llama")
    session(native)
    change(native.model)
    assert all(distance(a, b) < 1e-5 for a, b in zip(session(native), session(eager), strict=True))
    assert native.engine == "native"


def wrap_linear(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)


def halve(model: Any) -> None:
    model.to(torch.bfloat16)


def steer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 2)


def steer_the_whole(model: Any) -> None:
    model.register_forward_hook(lambda module, inputs, output: output)


def steer_the_decoder(model: Any) -> None:
    model.model.register_forward_pre_hook(lambda module, inputs: None)


def replace_forward(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *inputs, **options: forward(*inputs, **options)


def replace_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrap_linear, "Sequential"),
        (halve, "bfloat16"),
        (steer, "hook"),
        (steer_the_whole, "hook"),
        (steer_the_decoder, "hook"),
        (replace_forward, "forward"),
        (replace_activation, "GELU"),
    ],
)
def test_a_change_it_does_not_know_makes_it_step_back(
    change: Callable[[Any], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    native, eager = pair("qwen2")
    session(native)
    change(native.model)
    with caplog.at_level(logging.WARNING):
        found = session(native)
    assert native.engine == "eager"
    (line,) = [message for message in caplog.messages if "torch eager" in message]
    assert words in line
    for one, other in zip(found, session(eager), strict=True):
        assert torch.equal(one, other)


def test_states_asked_for_once_do_not_cost_the_native_forward() -> None:
    native, eager = pair("llama")
    native.model(ids(1, 5, generator=torch.Generator().manual_seed(1)), output_hidden_states=True)
    assert all(distance(a, b) < 1e-5 for a, b in zip(session(native), session(eager), strict=True))
    assert native.engine == "native"


REFUSED = {
    "head width": ("llama", {"head_dim": 24}),
    "inner size": ("llama", {"intermediate_size": 72}),
    "activation": ("llama", {"hidden_act": "gelu"}),
    "rotary type 'dynamic'": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_does_not_know_runs_on_eager_with_a_reason(words: str, caplog: pytest.LogCaptureFixture) -> None:
    name, changes = REFUSED[words]
    target = Target(family(name, **changes), name="tiny", taps=(0, 2, 2))
    with caplog.at_level(logging.WARNING):
        assert target.engine == "eager"
        session(target)
    (line,) = caplog.messages
    assert line.startswith("tiny runs on torch eager, because") and words in line


def test_another_architecture_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class OursForCausalLM(type(family("llama"))):  # type: ignore[misc]
        pass

    model = family("llama")
    model.__class__ = OursForCausalLM
    assert Target(model).engine == "eager"
    assert "OursForCausalLM" in caplog.text


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A model that computes something else than its parts say is caught by the comparison, not by its name."""
    model = family("llama")
    norm = type(model.model.norm)
    monkeypatch.setattr(norm, "forward", lambda self, x: x * self.weight)
    assert Target(model).engine == "eager"
    assert "differ by" in caplog.text


def test_off_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert Target(family("llama"), compile="off").engine == "eager"
    assert not caplog.messages


def test_a_token_outside_the_vocabulary_is_an_error() -> None:
    target, _ = pair("llama")
    with pytest.raises(TargetError, match="vocabulary"):
        target.prefill(target.new_cache(1, capacity=8), [torch.tensor([3, 97])])
