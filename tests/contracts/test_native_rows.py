"""Native attention of one token per row: as near the truth as torch's, the same bits in any company, or not used."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fixtures_native import family, half, steps
from paceline.native.build import PORTABLE, TUNING, Unavailable, build_library
from paceline.native.library import Library, Team
from paceline.native.rows import attend
from paceline.targets import _native
from paceline.targets.generic import Target

TUNINGS = {"native": TUNING, "portable": ((*PORTABLE, "-O1"),)}
LENGTHS = (1, 450, 17, 2, 333, 64)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each library is compiled once for this file, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield {name: Library(build_library(tuning=tuning)) for name, tuning in TUNINGS.items()}


def tensors(lengths: tuple[int, ...], *, group: int, width: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, A, 1, C], keys and values [B, A_kv, view, C] that show a part of longer buffers; NaN behind lengths."""
    generator = torch.Generator().manual_seed(group * 1000 + width)
    view = max(lengths) + 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    query = draw(len(lengths), heads * group, 1, width) * 2
    keys, values = (draw(len(lengths), heads, view + 9, width)[:, :, :view] for _ in range(2))
    for row, length in enumerate(lengths):
        keys[row, :, length:] = values[row, :, length:] = torch.nan
    return query, keys, values


def by_torch(query: Tensor, keys: Tensor, values: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
    """The slow twin, row by row: [B, 1, A, C]."""
    group, rows = query.shape[1] // keys.shape[1], []
    for row, length in enumerate(lengths):
        key, value = (part[row : row + 1, :, :length].repeat_interleave(group, dim=1) for part in (keys, values))
        rows.append(scaled_dot_product_attention(query[row : row + 1], key, value, scale=0.125))
    return torch.cat(rows).transpose(1, 2)


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-60, float("inf"), float("nan")])
def test_a_scale_that_would_give_no_number_is_refused(scale: float, compiled: dict[str, Library]) -> None:
    query, keys, values = tensors(LENGTHS, group=3, width=64)
    with pytest.raises(Unavailable, match="is scaled by"):
        attend(compiled["native"], query, keys, values, counts=torch.tensor(LENGTHS), scale=scale)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_no_further_from_the_truth_than_torch(
    group: int, width: int, tuning: str, compiled: dict[str, Library]
) -> None:
    lengths = (*LENGTHS, 16 * 1024 + 1) if width == 64 else LENGTHS
    query, keys, values = tensors(lengths, group=group, width=width)
    found = attend(compiled[tuning], query, keys, values, counts=torch.tensor(lengths), scale=0.125)
    truth = by_torch(query.double(), keys.double(), values.double(), lengths=lengths)
    theirs = by_torch(query, keys, values, lengths=lengths)
    for row in range(len(lengths)):
        mine = (found[row] - truth[row]).abs()
        assert mine.max() <= (theirs[row] - truth[row]).abs().max()
        assert mine.max() <= 2**-8 * truth[row].abs().max()  # the last rounding is half of that


def test_a_long_row_is_rounded_once(compiled: dict[str, Library]) -> None:
    lengths = (16 * 1024 + 1, 450)
    query, keys, values = tensors(lengths, group=3, width=64)
    found = attend(compiled["native"], query, keys, values, counts=torch.tensor(lengths), scale=0.125)
    truth = by_torch(query.double(), keys.double(), values.double(), lengths=lengths).bfloat16()
    theirs = by_torch(query, keys, values, lengths=lengths)
    assert (found == truth).double().mean() > max(0.98, (theirs == truth).double().mean())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("team", ["borrowed", "own"])
def test_a_row_depends_on_nothing_but_itself(
    team: str, threads: int, compiled: dict[str, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled["native"]
    if team == "own":
        monkeypatch.setattr(library, "team", Team(None, None, None))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query, keys, values = tensors(LENGTHS, group=3, width=80)
    counts = torch.tensor(LENGTHS)
    together = attend(library, query, keys, values, counts=counts, scale=0.125)
    for row, length in enumerate(LENGTHS):
        part = slice(row, row + 1)
        alone = [tensor[part, :, :length].contiguous() for tensor in (keys, values)]
        found = attend(library, query[part], *alone, counts=counts[part], scale=0.125)
        assert torch.equal(found, together[part])
    assert torch.equal(attend(library, query, keys, values, counts=counts, scale=0.125), together)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v, n: (q.float(), k, v, n), "float32"),
        (lambda q, k, v, n: (q, k, v, n + 400), "more slots than are shown"),
        (lambda q, k, v, n: (q, k, v, n * 0), "no slot"),
        (lambda q, k, v, n: (q, k, v, n.int()), "int32"),
        (lambda q, k, v, n: (q[:, :5], k, v, n), "evenly"),
        (lambda q, k, v, n: (q[..., :8], k[..., :8], v[..., :8], n), "head width of 8"),
        (lambda q, k, v, n: (q, k, v[:, :, 1:], n), "shaped"),
        (lambda q, k, v, n: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v, n), "slot behind slot"),
    ],
)
def test_what_it_cannot_read_is_refused(
    change: Callable[..., tuple[Tensor, ...]], reason: str, compiled: dict[str, Library]
) -> None:
    if "width" in reason and compiled["native"].narrowest <= 8:
        reason = ""  # a machine of four lanes takes heads as narrow as that, if they lie close
    query, keys, values, counts = change(*tensors(LENGTHS, group=3, width=64), torch.tensor(LENGTHS))
    with pytest.raises(Unavailable, match=reason):
        attend(compiled["native"], query, keys, values, counts=counts, scale=0.125)


@pytest.mark.parametrize("width", [32, 320])  # 5.x folds the heads of a group where they are wider than 256
@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen3"])
def test_steps_are_those_of_torch(name: str, width: int, caplog: pytest.LogCaptureFixture) -> None:
    model = half(name, head_dim=width)
    native, eager = Target(model, taps=(0, 2)), Target(model, taps=(0, 2), compile="off")
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for found, expected in zip(steps(native), steps(eager), strict=True):
            assert (found.float() - expected.float()).abs().max() < 0.1 * expected.float().std()
    assert native._rows is not None and eager._rows is None
    assert model.config._attn_implementation == "sdpa"
    assert not any("attends in torch" in message for message in caplog.messages)


def test_every_step_attends_natively_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(half("llama"), taps=(0,))
    steps(target, count=1)
    calls: list[int] = []
    original = _native.rows.attend
    monkeypatch.setattr(_native.rows, "attend", lambda *a, **k: calls.append(1) or original(*a, **k))
    steps(target, count=2)
    assert len(calls) == 2 * target.num_layers
    cache = target.new_cache(1, capacity=8)
    target.prefill(cache, [torch.tensor([1, 2, 3])])
    target.model(torch.tensor([[1]]))
    assert len(calls) == 2 * target.num_layers


def attend_eagerly(model: Any) -> None:
    """A layer that goes its own way."""
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"


def attend_unseen(model: Any) -> None:
    """A layer whose attention asks nobody."""
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **_: (layer.o_proj(layer.q_proj(hidden_states)), None)


@pytest.mark.parametrize(
    ("change", "reason"), [(attend_eagerly, "do more with their keys"), (attend_unseen, "2 of its 3 layers")]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_that_attends_in_its_own_way_is_noticed(
    when: str, change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = half("llama", hidden_size=128)
    native, eager = Target(model, taps=(0,)), Target(model, taps=(0,), compile="off")
    if when == "after":
        steps(native, count=1)
        assert native._rows is not None
    change(model)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        found, expected = steps(native), steps(eager)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert reason in caplog.messages[-1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: half("mistral"), "slides over a window"),
        (lambda: half("qwen2"), "slides over a window"),
        (lambda: half("llama", attn_implementation="eager"), "not torch's scaled dot product"),
        (lambda: half("llama", head_dim=6, hidden_size=48), "head width of 6"),
    ],
)
def test_other_attention_stays_with_torch(
    model: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    native, eager = Target(model(), taps=(0,)), Target(model(), taps=(0,), compile="off")
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert all(torch.equal(a, b) for a, b in zip(steps(native), steps(eager), strict=True))
    assert sum("attends in torch" in message for message in caplog.messages) == 1 and reason in caplog.text


@pytest.mark.parametrize("fault", ["value", "length"])
def test_a_wrong_kernel_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = _native.rows.attend

    def wrong(*tensors: Any, counts: Tensor, scale: float) -> Tensor:
        if fault == "length":
            return original(*tensors, counts=(counts - 1).clamp_min(1), scale=scale)
        return original(*tensors, counts=counts, scale=scale) * 1.05

    monkeypatch.setattr(_native.rows, "attend", wrong)
    model = half("llama")
    native, eager = Target(model, taps=(0,)), Target(model, taps=(0,), compile="off")
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert all(torch.equal(a, b) for a, b in zip(steps(native), steps(eager), strict=True))
    assert "a layer's attention and torch's differ" in caplog.text


def test_float32_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "choose_rows", lambda *a, **k: pytest.fail("asked"))
    steps(Target(family("llama"), taps=(0,)))
