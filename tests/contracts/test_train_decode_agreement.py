"""Acceptance 17, 19, 20 (K01, K04, K23): what is trained is what is decoded, position by position."""

from __future__ import annotations

import pytest
import torch

import paceline
from fixtures_decoding import new_tokens
from fixtures_drafts import SEQUENTIAL, batch_of, max_difference, random_rows, tiny_draft, tiny_eagle3
from fixtures_models import bigram_model, cycle_table, make_target, tiny_llama
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import SequentialProposer
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.training import simulate
from paceline.training.collate import supervised, table
from paceline.training.objectives.ttt import TTT, TTTConfig
from paceline.training.unroll import unroll


def test_table_of_a_three_plus_five_conversation() -> None:
    ids, mask = torch.arange(10, 18), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]).bool()
    rows = [entry for entry in table(ids, mask, steps=2) if entry["weight"]]
    # Row 2 is the last prompt position: fed answer token 1 (13), it predicts answer token 2 (14).
    assert rows[0] == {"step": 0, "row": 2, "input": 13, "feature": 2, "label": 14, "weight": 1}
    assert [entry["label"] for entry in rows if entry["step"] == 0] == [14, 15, 16, 17]
    assert [entry["label"] for entry in rows if entry["step"] == 1] == [15, 16, 17]
    assert [(entry["row"], entry["input"]) for entry in rows if entry["step"] == 1] == [(2, 14), (3, 15), (4, 16)]


def test_a_later_answer_is_not_predicted_from_an_earlier_one() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 0, 0]]).bool()
    assert supervised(mask, step=0)[0].nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert supervised(mask, step=1)[0].nonzero().flatten().tolist() == [0, 4]
    assert not supervised(mask, step=2).any()


@pytest.mark.parametrize("words", [None, 40])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_training_logits_at_step_j_are_the_decoders_after_j_accepted_tokens(name: str, words: int | None) -> None:
    target = make_target(tiny_llama())
    draft = tiny_draft(name, target, words=words)
    rows = random_rows(4)
    batch = batch_of(target, rows, taps=draft.taps)
    steps = 4
    trained = [(draft.logits(step.hidden), step) for step in unroll(draft, batch, target, steps=steps)]
    for row, (ids, prompt) in enumerate(rows):
        for anchor in range(prompt - 1, len(ids) - 2):
            decoded = decoder_logits(draft, target, ids, anchor=anchor, steps=min(steps, len(ids) - 2 - anchor))
            for step, logits in enumerate(decoded):
                place = (trained[step][1].rows.batch == row) & (trained[step][1].rows.time == anchor)
                assert bool(trained[step][1].active[place])
                assert max_difference(trained[step][0][place][0], logits) < 1e-5


def decoder_logits(draft, target, ids: list[int], *, anchor: int, steps: int) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """The decode loop's own objects: context up to `anchor`, then the given tokens drafted one by one."""
    proposer = SequentialProposer(draft, target, ProposalPlan.chain(steps + 1), DraftSampling())
    proposer.begin(1, capacity=64)
    target.set_taps(draft.taps)
    cache = target.new_cache(1, capacity=64)
    taps = target.prefill(cache, [torch.tensor(ids[: anchor + 1])]).taps
    target.set_taps(())
    proposer.observe([ids[1 : anchor + 2]], context=[ids[: anchor + 2]], taps=taps)
    seen = [proposer._root.logits[0, 0]]
    forced = iter(ids[anchor + 2 :])
    original = proposer._expand

    def expand(level):  # type: ignore[no-untyped-def]
        level.tokens.fill_(next(forced))  # what verification would have accepted
        output = original(level)
        seen.append(output.logits[0, 0])
        return output

    proposer._expand = expand  # type: ignore[method-assign]
    proposer.propose([ids[anchor + 1]], limits=[steps], dice=[RowDice(0)])
    return seen[:steps]


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_draft_keys_of_accepted_tokens_equal_a_recomputation(name: str) -> None:
    target = make_target(tiny_llama())
    draft = tiny_draft(name, target)
    kept = {}

    class Watching(SequentialProposer):
        def observe(self, tokens, *, context, taps):  # type: ignore[no-untyped-def]
            super().observe(tokens, context=context, taps=taps)
            kept["ids"], kept["keys"] = list(context[0]), self.cache.keys[0][0, :, : self.cache.lengths[0]].clone()

    plan = ProposalPlan(depth=4, width=3, nodes=9)
    proposer = Watching(draft, target, plan, DraftSampling())
    from paceline.decoding.loop import DecodeLoop, RowState

    row = RowState(0, [1, 2, 3], 3, 24, None, lambda ids: len(ids) >= 27, RowDice(0), True)
    list(DecodeLoop(target, proposer, scratch=plan.scratch).run([row]))
    ids = kept["ids"]
    fresh = SequentialProposer(draft, target, plan, DraftSampling())
    fresh.begin(1, capacity=64)
    target.set_taps(draft.taps)
    taps = target.prefill(target.new_cache(1, capacity=64), [torch.tensor(ids[:-1])]).taps
    fresh.observe([ids[1:]], context=[ids], taps=taps)
    assert max_difference(fresh.cache.keys[0][0, :, : len(ids) - 1], kept["keys"]) < 1e-5


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_simulated_length_is_the_decoders(name: str) -> None:
    target = make_target(tiny_llama())
    draft = tiny_draft(name, target)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [20, 21]]
    result = paceline.generate(target, prompts, draft=draft, plan=ProposalPlan.chain(3), max_new_tokens=30)
    rows = [(row.prompt + row.tokens, len(row.prompt)) for row in result.rows]
    batch = batch_of(target, rows, taps=draft.taps)
    length, rounds, _error = simulate.accepted_length(draft, [batch], target, depth=3)
    total = result.stats.total
    assert rounds == total.rounds
    assert length == pytest.approx(total.accepted_length)


def test_a_draft_trained_on_the_cycle_is_always_accepted() -> None:
    target = make_target(bigram_model(cycle_table()))
    draft = tiny_eagle3(target, scale=0.05)
    rows = [([(start + i) % 13 for i in range(24)], 3) for start in range(13)]
    batch = batch_of(target, rows, taps=draft.taps)
    objective = TTT(TTTConfig(steps=4))
    optimiser = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for step in range(150):
        terms = objective.loss(draft, batch, target, step=step)
        loss = terms.numerator / terms.denominator
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    accuracies = [float(n / d) for name, (n, d) in terms.metrics.items() if name.startswith("accuracy")]
    assert accuracies == [1.0] * 4
    result = paceline.generate(target, [4, 5, 6], draft=draft, plan=ProposalPlan.chain(4), max_new_tokens=41)
    assert result.stats.total.accepted_length == 5.0
    assert result.rows[0].tokens == new_tokens(target.model, [4, 5, 6], max_new_tokens=41)
    random = paceline.generate(
        make_target(tiny_llama(seed=5, layers=3, hidden_size=64)), [4, 5, 6], draft=draft, plan=ProposalPlan.chain(4),
        max_new_tokens=40,
    )  # fmt: skip
    assert random.stats.total.accepted_length < 2.0  # another text: chance
