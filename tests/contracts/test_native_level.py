"""A draft's levels in the native forward are those of its own modules, alone and in ragged batches."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from fixtures_drafts import max_difference, tiny_eagle3
from fixtures_native import VOCAB, family, ids, random_tree, tree
from paceline.cache import KVCache
from paceline.decoding.level import EagerLevel, LevelRunner, NativeLevel, choose_level
from paceline.drafts.eagle3 import Eagle3
from paceline.targets.generic import Target


def native_target() -> Target:
    target = Target(family("llama", attention_bias=False, mlp_bias=False))
    assert target.engine == "native"
    return target


def drafts(target: Target) -> Eagle3:
    """A draft whose norms are not trivial, with a vocabulary smaller than the target's."""
    draft = tiny_eagle3(target, words=48)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return draft.requires_grad_(False)


def session(run: LevelRunner, draft: Eagle3, *, batch: int) -> list[Tensor]:
    """Ragged context, then two proposals of three levels each; everything that came out."""
    generator = torch.Generator().manual_seed(5)
    cache, found = KVCache(batch, capacity=90), []
    for lengths in ((2, 21, 34)[:batch], (3, 1, 2)[:batch]):
        count = max(lengths)
        causal = torch.ones(count, count, dtype=torch.bool).tril().expand(batch, -1, -1)
        features = torch.randn(batch, count, draft.config.hidden_size, generator=generator)
        last = torch.arange(batch) * count + torch.tensor(lengths) - 1
        out = run(
            cache, ids(batch, count, generator=generator), features,
            depths=torch.arange(count).expand(batch, -1), seen=causal, above=0, wanted=last[:, None],
        )  # fmt: skip
        found += [out.logits, out.hidden]
        cache.commit([range(length) for length in lengths])
        mask, depths = tree(random_tree(9, generator=generator))
        order = depths.argsort(stable=True)
        mask, depths, start = mask[order][:, order], depths[order], 0
        for depth in depths.unique().tolist():  # one call for each depth of the tree
            stop = start + int((depths == depth).sum())
            hidden = torch.randn(batch, stop - start, draft.config.hidden_size, generator=generator)
            out = run(
                cache, ids(batch, stop - start, generator=generator), hidden,
                depths=torch.full((batch, stop - start), depth), seen=mask[start:stop, :stop].expand(batch, -1, -1),
                above=start, wanted=torch.arange(batch * (stop - start)).view(batch, -1),
            )  # fmt: skip
            found += [out.logits, out.hidden]
            start = stop
    return [*found, *(cache.keys[0][row, :, :length] for row, length in enumerate(cache.lengths))]


@pytest.mark.parametrize("batch", [1, 3])
def test_native_levels_are_those_of_the_drafts_modules(batch: int) -> None:
    target = native_target()
    draft = drafts(target)
    native = choose_level(draft, target)
    assert isinstance(native, NativeLevel)
    found, expected = session(native, draft, batch=batch), session(EagerLevel(draft, target), draft, batch=batch)
    assert len(found) > 10
    for one, two in zip(found, expected, strict=True):
        assert max_difference(one, two) < 1e-5 * float(two.abs().max())


def test_a_target_on_torch_eager_keeps_its_draft_there() -> None:
    target = Target(family("llama"), compile="off")
    assert isinstance(choose_level(drafts(target), target), EagerLevel)


def test_a_draft_that_the_native_forward_cannot_read_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target = native_target()
    draft = drafts(target).to(torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert isinstance(choose_level(draft, target), EagerLevel)
    assert caplog.messages == ["the draft runs on torch eager, because its weights are bfloat16 on cpu"]


class Odd(nn.Linear):
    """A layer that may compute anything, as quantised ones do."""


class Other(Eagle3):
    """A draft that finishes its layer in another way."""

    def finish(self, features: Tensor, mixed: Tensor) -> Tensor:
        return features - mixed


def hook(draft: Eagle3) -> Eagle3:
    draft.midlayer.mlp.register_forward_hook(lambda module, inputs, output: output * 0)
    return draft


def wrap(draft: Eagle3) -> Eagle3:
    draft.lm_head.__class__ = Odd
    return draft


def derive(draft: Eagle3) -> Eagle3:
    other = Other(draft.config, draft.vocab)
    other.load_state_dict(draft.state_dict())
    return other


@pytest.mark.parametrize(("change", "words"), [(hook, "hook"), (wrap, "Odd stands"), (derive, "layer of Other")])
def test_a_draft_that_was_changed_runs_its_own_modules(change, words: str, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    target = native_target()
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert isinstance(choose_level(change(drafts(target)), target), EagerLevel)
    assert words in caplog.messages[0]


def test_a_token_outside_the_targets_vocabulary_is_refused() -> None:
    target = native_target()
    draft = drafts(target)
    run = choose_level(draft, target)
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(Exception, match="token id lies outside"):
        run(
            KVCache(1, capacity=8), torch.tensor([[VOCAB]]), torch.zeros(1, 1, draft.config.hidden_size),
            depths=torch.zeros(1, 1, dtype=torch.int64), seen=one, above=0, wanted=torch.zeros(1, 1, dtype=torch.int64),
        )  # fmt: skip
