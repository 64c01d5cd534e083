"""Native attention of single tokens beside other calls: they see nothing of it, and it sees nothing of them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fixtures_native import family, half, steps
from paceline.targets import _native
from paceline.targets._transformers import cache_argument
from paceline.targets.generic import Target


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def in_the_midst(model: Any, call: Callable[[], None], *, layer: int = 1) -> Generator[None, None, None]:
    """A forward hook calls something in the first single-token step that passes it."""
    waiting = [call]

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.shape[1] == 1 and waiting:
            waiting.pop()()

    handle = model.model.layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    assert not waiting


def in_a_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def padded(model: Any) -> list[Tensor]:
    """A user's own calls: left padding and no cache, a prompt, a token behind it."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        first = model(tokens[:1], use_cache=True)
        after = model(tokens[1:, :1], **{cache_argument(model): first.past_key_values})
        return [model(tokens, attention_mask=mask).logits, first.logits, after.logits]


@pytest.mark.parametrize("run", [in_a_thread, lambda call: call()], ids=["another thread", "a hook"])
@pytest.mark.parametrize("other", ["same target", "same model", "same config"])
def test_a_call_in_the_midst_of_a_step_is_its_own(
    other: str, run: Callable[[Callable[[], None]], None], caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(half("llama"))
    model = target.model if other != "same config" else type(target.model)(target.model.config).bfloat16().eval()
    second = target if other == "same target" else Target(model)
    expected, theirs, users = steps(target), steps(second), padded(model)
    between: list[bool] = []
    caplog.clear()

    def call() -> None:
        between.append(same(padded(model), users))
        between.append(same(steps(second), theirs))

    with in_the_midst(target.model, lambda: run(call)):
        found = steps(target)
    assert between == [True, True] and same(found, expected)
    assert target._rows is not None and second._rows is not None and not caplog.messages


def test_two_threads_take_steps_at_once() -> None:
    target = Target(half("llama"), taps=(0, 2))
    expected = steps(target)
    barrier = threading.Barrier(2)

    def work() -> bool:
        barrier.wait()
        return all(same(steps(target, count=8)[: len(expected)], expected) for _ in range(4))

    with ThreadPoolExecutor(2) as pool:
        assert all(future.result() for future in [pool.submit(work) for _ in range(2)])


def test_a_thread_waits_for_the_choice_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    original, choosing, asked = _native.choose_rows, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        choosing.set()
        asked.wait(0.5)  # longer than the other thread's prefill takes to come here, if it does not wait
        return original(*arguments, **options)

    monkeypatch.setattr(_native, "choose_rows", slow)
    target = Target(half("llama"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(steps, target)
        choosing.wait()
        second = pool.submit(steps, target)
        second.add_done_callback(lambda _: asked.set())
        assert same(second.result(), first.result())
    assert same(steps(target), first.result())


def test_a_step_changes_nothing_that_others_see_even_if_interrupted() -> None:
    model = half("llama")
    target = Target(model)
    before, names, seen = dict(vars(model.config)), dict(ALL_ATTENTION_FUNCTIONS), []
    expected = steps(target)

    def interrupt() -> None:
        seen.append((dict(vars(model.config)), dict(ALL_ATTENTION_FUNCTIONS)))
        raise KeyboardInterrupt

    cache = target.new_cache(1, capacity=8)
    target.prefill(cache, [torch.tensor([1, 2, 3])])
    token, own, depth = torch.tensor([[4]]), torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
    whole = target.score(cache, token, mask=own, depths=depth).logits
    with in_the_midst(model, interrupt), pytest.raises(KeyboardInterrupt):
        target.score(cache, token, mask=own, depths=depth)
    assert [*seen, (dict(vars(model.config)), dict(ALL_ATTENTION_FUNCTIONS))] == [(before, names)] * 2
    assert torch.equal(target.score(cache, token, mask=own, depths=depth).logits, whole) and same(
        steps(target), expected
    )
    assert torch.equal(target._score_eager(cache, token, mask=own, depths=depth).logits.argmax(), whole.argmax())


def test_a_function_put_under_torchs_name_is_not_bypassed() -> None:
    model = half("llama")
    native, eager = Target(model), Target(model, compile="off")
    expected, theirs = steps(native), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def halved(*arguments: Any, **options: Any) -> Any:
        out, weights = theirs(*arguments, **options)
        return out * 0.5, weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = halved
    try:
        found = steps(native)
        assert same(found, steps(eager)) and not same(found, expected)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert same(steps(native), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda target: pickle.loads(pickle.dumps(target))])  # noqa: S301
@pytest.mark.parametrize("make", [half, family])
def test_a_copy_of_a_target_chooses_anew(make: Callable[[str], Any], copied: Callable[[Target], Target]) -> None:
    target = Target(make("llama"))
    expected = steps(target)
    twin = copied(target)
    assert twin.model is not target.model and twin._rows is None and twin._native is None
    assert same(steps(twin), expected) and same(steps(target), expected)
    assert twin.engine == target.engine and (twin._rows is None) == (target._rows is None)


def test_a_copy_of_a_target_records_its_own_taps() -> None:
    target = Target(half("llama"), taps=(0, 2))
    expected = steps(target)
    twin = copy.deepcopy(target)
    assert same(steps(twin), expected) and same(steps(target), expected)
    twin.set_taps((1,))
    assert len(twin._layers[1]._forward_hooks) == 1 and not twin._layers[0]._forward_hooks
    assert same(steps(target), expected)
