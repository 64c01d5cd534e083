"""Acceptance 18, 19, 20 (K04, K11, K23) for block drafts: what is trained is what is decoded, and nothing leaks."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

import paceline
from fixtures_blocks import tiny_dflash
from fixtures_decoding import new_tokens, prompts
from fixtures_drafts import batch_of, max_difference, random_rows
from fixtures_models import bigram_model, cycle_table, make_target, random_table, tiny_llama, tiny_mistral
from fixtures_text import tiny_tokenizer
from fixtures_training import Onlooker, counting_target, recipe_of, trained_draft, write_rows
from paceline.decoding.blocks import BlockProposer
from paceline.decoding.loop import DecodeLoop, RowState
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts import dflash
from paceline.drafts._base import BlockDraft
from paceline.errors import ConfigError
from paceline.store.checkpoint import DraftInfo, load_draft, save_draft
from paceline.store.fingerprint import identify_target
from paceline.store.weights import read_tensors
from paceline.targets.generic import Target
from paceline.training import blocks as blocks_module
from paceline.training import simulate
from paceline.training.paths import guided
from paceline.training.prepare import prepare
from paceline.training.trainer import train

SHAPES = {"chain": ProposalPlan.chain(5), "tree": ProposalPlan(depth=4, width=3, nodes=9)}


def taps_of(target: Target, draft: BlockDraft, rows: list[list[int]]) -> Tensor:
    target.set_taps(draft.taps)
    taps = target.prefill(target.new_cache(len(rows), capacity=64), [torch.tensor(row) for row in rows]).taps
    target.set_taps(())
    assert taps is not None
    return taps


def proposer_at(
    target: Target, draft: BlockDraft, rows: list[list[int]], *, plan: ProposalPlan | None = None
) -> BlockProposer:
    """A proposer that has seen all but the last token of each row."""
    proposer = BlockProposer(draft, target, plan or ProposalPlan.chain(3), DraftSampling())
    proposer.begin(len(rows), capacity=4)  # so little that the cache has to grow
    proposer.observe([row[1:] for row in rows], context=rows, taps=taps_of(target, draft, [row[:-1] for row in rows]))
    return proposer


def test_names_and_shapes_are_the_published_ones() -> None:
    draft = tiny_dflash(make_target(tiny_llama(layers=8)))
    shapes = {name: tuple(value.shape) for name, value in draft.state_dict().items()}
    taps = len(draft.taps)
    expected = {"fc.weight": (32, taps * 32), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for layer in range(2):
        place = f"layers.{layer}"
        expected |= {
            f"{place}.self_attn.q_proj.weight": (32, 32), f"{place}.self_attn.k_proj.weight": (16, 32),
            f"{place}.self_attn.v_proj.weight": (16, 32), f"{place}.self_attn.o_proj.weight": (32, 32),
            f"{place}.self_attn.q_norm.weight": (8,), f"{place}.self_attn.k_norm.weight": (8,),
            f"{place}.mlp.gate_proj.weight": (48, 32), f"{place}.mlp.up_proj.weight": (48, 32),
            f"{place}.mlp.down_proj.weight": (32, 48), f"{place}.input_layernorm.weight": (32,),
            f"{place}.post_attention_layernorm.weight": (32,),
        }  # fmt: skip
    assert shapes == expected


@pytest.mark.parametrize(
    ("layers", "count", "taps"), [(36, 5, (1, 9, 17, 25, 33)), (36, 1, (18,)), (40, 8, (1, 6, 11, 16, 22, 27, 32, 37))]
)
def test_taps_are_the_published_ones(layers: int, count: int, taps: tuple[int, ...]) -> None:
    assert dflash.default_taps(layers, count=count) == taps


@pytest.mark.parametrize("layers", range(1, 12))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_shallow_target_is_tapped_where_it_has_layers(layers: int, count: int) -> None:
    taps = dflash.default_taps(layers, count=count)
    assert taps and len(set(taps)) == len(taps) and all(0 <= tap < layers for tap in taps)


@pytest.mark.parametrize("words", [None, 40])
def test_training_logits_are_the_decoders(words: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "SCORES", 300)  # several parts for each row
    target = make_target(tiny_llama())
    draft = tiny_dflash(target, words=words)
    rows = random_rows(4)
    batch = batch_of(target, rows, taps=draft.taps)
    steps = list(guided(draft, batch, target, steps=5))
    seen = 0
    for row, (ids, prompt) in enumerate(rows):
        for time in range(prompt - 1, len(ids) - 2):
            said = proposer_at(target, draft, [ids[: time + 2]]).say([ids[time + 1]])[0]
            for step in steps:
                place = (step.rows.batch == row) & (step.rows.time == time)
                assert bool(step.active[place]) == (time + 2 + step.step < len(ids))
                assert max_difference(draft.logits(step.hidden)[place][0], said[step.step]) < 1e-5
                seen += 1
    assert seen == 5 * len(steps[0].hidden)


def test_states_at_and_behind_an_anchor_do_not_leak_into_its_block() -> None:
    """K04, with anchors so close that their blocks overlap."""
    target = make_target(tiny_llama())
    draft = tiny_dflash(target)
    batch = batch_of(target, random_rows(2), taps=draft.taps)
    before = list(guided(draft, batch, target, steps=5))
    rows = before[0].rows
    moved = 0
    for time in rows.time[rows.batch == 1].tolist():
        taps = batch.taps.clone()
        taps[1, time + 1 :] += torch.randn_like(taps[1, time + 1 :])
        after = list(guided(draft, replace(batch, taps=taps), target, steps=5))
        behind = (rows.batch == 1) & (rows.time > time)
        for one, two in zip(before, after, strict=True):
            assert max_difference(one.hidden[~behind], two.hidden[~behind]) == 0.0
            moved += int(((one.hidden - two.hidden).abs().amax(dim=-1) > 1e-3)[behind].sum())
        for one, two in zip(before, after, strict=True):
            assert bool(((one.hidden - two.hidden).abs().amax(dim=-1) > 1e-3)[behind].all())
    assert moved


def test_the_anchors_own_feature_is_used_by_the_next_row_only() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target)
    batch = batch_of(target, random_rows(1), taps=draft.taps)
    step = next(guided(draft, batch, target, steps=1))
    taps = batch.taps.clone()
    time = int(step.rows.time[2])
    taps[0, time] += 1.0
    other = next(guided(draft, replace(batch, taps=taps), target, steps=1))
    changed = (step.hidden - other.hidden).abs().amax(dim=-1) > 1e-3
    assert torch.equal(changed, step.rows.time >= time)


def test_drawn_rows_are_some_of_all_rows_and_say_the_same() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target)
    batch = batch_of(target, random_rows(4), taps=draft.taps)
    every = list(guided(draft, batch, target, steps=3))
    chosen = [list(guided(draft, batch, target, steps=3, seed=seed, most=5)) for seed in (0, 0, 1)]
    places = [set(zip(one[0].rows.batch.tolist(), one[0].rows.time.tolist(), strict=True)) for one in chosen]
    assert [len(place) for place in places] == [5, 5, 5]
    assert places[0] == places[1] != places[2]
    whole = list(zip(every[0].rows.batch.tolist(), every[0].rows.time.tolist(), strict=True))
    for step, one in zip(every, chosen[0], strict=True):
        index = [whole.index(place) for place in zip(one.rows.batch.tolist(), one.rows.time.tolist(), strict=True)]
        assert max_difference(step.hidden[index], one.hidden) < 1e-5
        assert torch.equal(step.active[index], one.active)


def test_a_cache_filled_piece_by_piece_says_what_one_filled_at_once_says() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target)
    rows = [ids[:9] for ids, _ in random_rows(3)]
    taps = taps_of(target, draft, [row[:-1] for row in rows])
    proposer = BlockProposer(draft, target, ProposalPlan.chain(3), DraftSampling())
    proposer.begin(3, capacity=4)
    cuts = [[0, 2, 3, 8], [0, 1, 5, 8], [0, 3, 4, 8]]  # rows advance by different numbers of tokens
    for part in range(3):
        pieces = [range(cut[part], cut[part + 1]) for cut in cuts]
        longest = max(map(len, pieces))
        padded = torch.stack(
            [
                torch.cat([taps[row][list(piece)], torch.full((longest - len(piece), taps.shape[-1]), 9.0)])
                for row, piece in enumerate(pieces)
            ]
        )
        tokens = [[rows[row][place + 1] for place in piece] for row, piece in enumerate(pieces)]
        proposer.observe(tokens, context=rows, taps=padded)
        proposer.say([tokens[row][-1] for row in range(3)])  # what a block writes is scratch
    roots = [row[-1] for row in rows]
    assert max_difference(proposer.say(roots), proposer_at(target, draft, rows).say(roots)) < 1e-5
    alone = torch.cat([proposer_at(target, draft, [row]).say([row[-1]]) for row in rows])
    assert max_difference(proposer.say(roots), alone) < 1e-5
    proposer.keep_rows([2, 0])
    assert max_difference(proposer.say([roots[2], roots[0]]), alone[[2, 0]]) < 1e-5


def test_every_path_of_a_tree_follows_the_slots_laws() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target, words=40)
    rows = [ids[:7] for ids, _ in random_rows(2)]
    proposer = proposer_at(target, draft, rows, plan=ProposalPlan(depth=4, width=3, nodes=9))
    roots = [row[-1] for row in rows]
    tree = proposer.propose(roots, limits=[4, 2], dice=[])
    log_q = proposer.say(roots).log_softmax(dim=-1)
    for row, limit in enumerate((4, 2)):
        best, ids = log_q[row].topk(3, dim=-1)
        words = draft.vocab.to_target(ids).tolist()
        every = {(): 0.0}
        for depth in range(limit):
            level = {path: score for path, score in every.items() if len(path) == depth}
            for path, score in level.items():
                for rank in range(3):
                    every[(*path, words[depth][rank])] = score + float(best[depth, rank])
        del every[()]
        expected = sorted(every, key=lambda path: -every[path])[:9]
        found = set()
        for node in range(1, tree.counts[row]):
            path: list[int] = []
            here = node
            while here:
                path.append(int(tree.tokens[row, here]))
                here = int(tree.parents[row, here])
            found.add(tuple(reversed(path)))
        assert found == set(expected)


class Watching(BlockProposer):
    def observe(self, tokens, *, context, taps):  # type: ignore[no-untyped-def]
        super().observe(tokens, context=context, taps=taps)
        self.ids = list(context[0])


def test_context_keys_after_decoding_equal_a_recomputation() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target)
    plan = SHAPES["tree"]
    proposer = Watching(draft, target, plan, DraftSampling())
    row = RowState(0, [1, 2, 3], 3, 24, None, lambda ids: len(ids) >= 27, RowDice(0), True)
    list(DecodeLoop(target, proposer, scratch=plan.scratch).run([row]))
    fresh = proposer_at(target, draft, [proposer.ids])
    length = len(proposer.ids) - 1
    assert proposer.cache.lengths == [length] == fresh.cache.lengths
    for layer in range(2):
        for mine, theirs in ((proposer.cache.keys, fresh.cache.keys), (proposer.cache.values, fresh.cache.values)):
            assert max_difference(mine[layer][0, :, :length], theirs[layer][0, :, :length]) < 1e-5


@pytest.mark.parametrize("words", [None, 40])
def test_a_saved_draft_says_the_same_and_holds_no_head(tmp_path, words: int | None) -> None:  # type: ignore[no-untyped-def]
    target = make_target(tiny_llama())
    draft = tiny_dflash(target, words=words)
    save_draft(tmp_path / "draft", draft, info=DraftInfo("dflash", draft.config, identify_target(target)))
    assert not {"head", "lm_head.weight"} & read_tensors(tmp_path / "draft" / "draft.safetensors").keys()
    again = load_draft(tmp_path / "draft", target=target, warn=pytest.fail).draft
    assert isinstance(again, dflash.DFlash) and again.mask_token_id == draft.mask_token_id
    again.borrow(target)
    ids = [3, 1, 4, 1, 5]
    assert torch.equal(proposer_at(target, draft, [ids]).say([5]), proposer_at(target, again, [ids]).say([5]))


def test_a_chain_deeper_than_the_block_is_refused() -> None:
    target = make_target(tiny_llama())
    draft = tiny_dflash(target, block=4)
    with pytest.raises(ConfigError, match=r"depth is 4; the draft's block of 4 says 3 tokens"):
        paceline.generate(target, [1, 2], draft=draft, plan=ProposalPlan.chain(4), max_new_tokens=4)
    batch = batch_of(target, random_rows(1), taps=draft.taps)
    with pytest.raises(ConfigError, match=r"steps is 4; a block of 4 says 3 tokens"):
        simulate.accepted_length(draft, [batch], target, depth=4)
    whole = paceline.generate(target, [1, 2], draft=draft, plan=ProposalPlan.chain(3), max_new_tokens=4)
    assert len(whole.rows[0].tokens) == 4


def test_a_target_that_caps_its_logits_is_refused_by_name() -> None:
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0, attn_logit_softcapping=None,
    )  # fmt: skip
    target = make_target(Gemma2ForCausalLM(config).eval())
    with pytest.raises(ConfigError, match=r"DFlash speaks .* caps its logits at 30"):
        tiny_dflash(target)


def test_simulated_length_is_the_decoders() -> None:
    target = make_target(tiny_llama())
    draft = drafts()["llama"]
    result = paceline.generate(target, prompts(3, seed=9), draft=draft, plan=ProposalPlan.chain(3), max_new_tokens=30)
    rows = [(row.prompt + row.tokens, len(row.prompt)) for row in result.rows]
    batch = batch_of(target, rows, taps=draft.taps)
    length, rounds, _error = simulate.accepted_length(draft, [batch], target, depth=3)
    assert rounds == result.stats.total.rounds
    assert length == pytest.approx(result.stats.total.accepted_length)
    assert length > 1.1


MODELS = {
    "cycle": lambda: bigram_model(cycle_table()),
    "bigram": lambda: bigram_model(random_table(64, seed=3)),
    "llama": tiny_llama,
    "window": tiny_mistral,
}
DFLASH = ("draft.name=dflash", "draft.options.mask_token_id=63", "draft.options.block_size=6", "objective.name=dflash")


@functools.cache
def targets() -> dict[str, tuple[Target, list[list[int]]]]:
    made = {name: make_target(model(), tokenizer=tiny_tokenizer()) for name, model in MODELS.items()}
    return {
        name: (target, [new_tokens(target.model, prompt, max_new_tokens=20) for prompt in prompts(8)])
        for name, target in ((name, made[name]) for name in made)
    }


@functools.cache
def drafts() -> dict[str, BlockDraft]:
    """Drafts that the real trainer has taught half of the texts."""
    found: dict[str, BlockDraft] = {}
    for name, (target, paths) in targets().items():
        known = [(prompt + path, len(prompt)) for prompt, path in zip(prompts(4), paths, strict=False)]
        changes = [*DFLASH, "objective.options={}", "training.learning_rate=3e-3"]
        draft = trained_draft(target, known, steps=80, changes=changes)
        assert isinstance(draft, BlockDraft)
        draft.borrow(target)
        found[name] = draft
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_is_identical(model: str, shape: str) -> None:
    target, expected = targets()[model]
    draft, plan = drafts()[model], SHAPES[shape]
    accepted = 0
    for start in (0, 4):
        batch = paceline.generate(target, prompts(8)[start : start + 4], draft=draft, plan=plan, max_new_tokens=20)
        assert [row.tokens for row in batch.rows] == expected[start : start + 4]
        accepted += batch.stats.total.accepted
    for index in (1, 6):
        alone = paceline.generate(target, prompts(8)[index], draft=draft, plan=plan, max_new_tokens=20)
        assert alone.rows[0].tokens == expected[index]
    assert accepted


@pytest.mark.parametrize("objective", ["dflash", "ttt"])
def test_a_cycle_is_learnt_by_the_real_trainer(tmp_path, objective: str) -> None:  # type: ignore[no-untyped-def]
    target = counting_target()
    rows = write_rows(tmp_path / "rows.jsonl", count=10, answer="one two three four five six seven eight nine ten one")
    changes = ["draft.name=dflash", f"objective.name={objective}", "draft.options.block_size=4"]
    changes += ["objective.options={}" if objective == "dflash" else "objective.options.steps=3"]
    changes += ["training.steps=80", "training.validate_every=40", "training.learning_rate=3e-3"]
    result = train(recipe_of(rows, *changes), out=tmp_path / "out", watch=Onlooker(), target=target)
    assert result.best == 11 / 3  # eleven tokens in three rounds of at most four: the most there is
    loaded = load_draft(tmp_path / "out" / "best", target=target, warn=pytest.fail)
    asked = [{"role": "user", "content": "hello what is the answer"}]  # none of the rows
    ids = target.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    out = paceline.generate(target, ids, draft=loaded, plan=ProposalPlan.chain(3), max_new_tokens=12)
    assert out.rows[0].tokens == new_tokens(target.model, ids, max_new_tokens=12)
    assert out.stats.total.accepted_length == 11 / 3


def test_a_validation_deeper_than_the_block_is_refused_before_training(tmp_path) -> None:  # type: ignore[no-untyped-def]
    recipe = recipe_of(write_rows(tmp_path / "rows.jsonl", count=4), *DFLASH[:-1], "validation.depth=6")
    target = make_target(tiny_llama(layers=3), tokenizer=tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"validation\.depth is 6; a block of 6 says 5"):
        prepare(recipe, target=target, say=lambda line: None)
