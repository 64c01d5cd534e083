"""The fused head and cross-entropy against its readable twin: value, gradients, memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.ops.fused_losses import CHUNK, among_best, head_cross_entropy, head_label_losses
from paceline.ops.losses import cross_entropy, soft_cross_entropy


def case(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 12, generator=generator).requires_grad_()
    weight = torch.randn(30, 12, generator=generator).requires_grad_()
    laws = torch.randn(rows + 5, 30, generator=generator).softmax(dim=-1)
    place = torch.randint(0, rows + 5, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.3)
    return hidden, weight, laws, place, weights


def test_value_and_gradients_equal_the_twin() -> None:
    for rows in (1, 7, CHUNK, CHUNK + 3):
        hidden, weight, laws, place, weights = case(rows)
        labels = (hidden @ weight.T).argmax(dim=-1).roll(1)
        total, losses, hits = head_cross_entropy(
            hidden, weight=weight, laws=laws, place=place, row_weights=weights, labels=labels
        )
        (2.5 * total).backward()
        fast = hidden.grad, weight.grad
        hidden.grad = weight.grad = None
        logits = hidden @ weight.T
        slow = soft_cross_entropy(logits, target=laws[place])
        (2.5 * (slow * weights).sum()).backward()
        assert torch.allclose(losses, slow, atol=1e-5)
        assert torch.equal(hits, logits.argmax(dim=-1) == labels)
        assert torch.allclose(total, (slow * weights).sum(), rtol=1e-5)
        for one, two in zip(fast, (hidden.grad, weight.grad), strict=True):
            assert one is not None and two is not None and torch.allclose(one, two, atol=2e-5, rtol=1e-4)


def test_bfloat16_is_close_and_gradients_keep_their_dtype() -> None:
    hidden, weight, laws, place, weights = case(50)
    exact, _, _ = head_cross_entropy(
        hidden, weight=weight, laws=laws, place=place, row_weights=weights, labels=place * 0
    )
    with torch.autocast("cpu", torch.bfloat16):
        close, _, _ = head_cross_entropy(
            hidden, weight=weight, laws=laws, place=place, row_weights=weights, labels=place * 0
        )
    close.backward()
    assert abs(float(close.detach() - exact.detach())) < 0.02 * abs(float(exact.detach()))
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32


def test_rows_of_weight_zero_do_not_pull() -> None:
    hidden, weight, laws, place, weights = case(9)
    total, _, _ = head_cross_entropy(
        hidden, weight=weight, laws=laws, place=place, row_weights=torch.zeros_like(weights), labels=place * 0
    )
    total.backward()
    assert hidden.grad is not None and float(hidden.grad.abs().max()) == 0.0


def test_a_borrowed_head_changes_no_gradient_of_the_states() -> None:
    hidden, weight, laws, place, weights = case(9)
    found = []
    for head in (weight, weight.detach()):
        total, _, _ = head_cross_entropy(
            hidden, weight=head, laws=laws, place=place, row_weights=weights, labels=place * 0
        )
        found.append(torch.autograd.grad(total, hidden)[0])
    assert torch.equal(*found)


def test_among_the_best_is_topk() -> None:
    for rows in (0, 5, CHUNK + 3):
        hidden, weight, _, _, _ = case(max(rows, 1))
        hidden = hidden[:rows]
        labels = torch.arange(rows) % 31 - 1
        best = (hidden @ weight.T).topk(3, dim=-1).indices
        expected = (best == labels[:, None]).any(dim=-1)
        assert torch.equal(among_best(hidden, weight=weight, labels=labels, count=3), expected)


def test_peak_memory_is_a_fraction_of_the_full_logits() -> None:
    """K31: V = 32k, S = 512, draft vocabulary 1k, hidden 64."""
    rows, words, full = 512, 1000, 32_000
    hidden = torch.randn(rows, 64).requires_grad_()
    weight = torch.randn(words, 64).requires_grad_()
    laws = torch.randn(rows, words).softmax(dim=-1)
    with LiveBytes() as live:
        total, _, _ = head_cross_entropy(
            hidden,
            weight=weight,
            laws=laws,
            place=torch.arange(rows),
            row_weights=torch.ones(rows),
            labels=torch.full((rows,), -1),
        )
        total.backward()
    assert rows * 64 * 4 < live.peak < rows * full * 4 / 4


class LiveBytes(TorchDispatchMode):
    """Most bytes of new storages alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor.untyped_storage())
        return result

    def watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.known or not size:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def test_each_rows_own_loss_equals_the_twin_with_any_weights() -> None:
    for rows in (1, 7, CHUNK, CHUNK + 3):
        hidden, weight, _, _, weights = case(rows)
        labels = torch.arange(rows) % 31 - 1  # the first of them has none
        losses, hits = head_label_losses(hidden, weight=weight, labels=labels)
        (losses * weights * losses.detach()).sum().backward()
        fast = hidden.grad, weight.grad
        hidden.grad = weight.grad = None
        logits = hidden @ weight.T
        slow = cross_entropy(logits, labels=labels.clamp_min(0)) * (labels >= 0)
        (slow * weights * slow.detach()).sum().backward()
        assert torch.allclose(losses, slow, atol=1e-5)
        assert torch.equal(hits, logits.argmax(dim=-1) == labels)
        for one, two in zip(fast, (hidden.grad, weight.grad), strict=True):
            assert one is not None and two is not None and torch.allclose(one, two, atol=1e-4, rtol=1e-4)


def test_no_rows_have_no_losses() -> None:
    hidden, weight, _, _, _ = case(4)
    losses, hits = head_label_losses(hidden[:0], weight=weight, labels=torch.zeros(0, dtype=torch.int64))
    assert (losses.shape, hits.dtype) == ((0,), torch.bool)
