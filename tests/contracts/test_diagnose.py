"""`paceline diagnose` on a tiny target and drafts that the trainer made: same tokens, true paths, a whole record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fixtures_blocks import tiny_dflash
from fixtures_decoding import CHAIN, SAMPLED_CHAIN, SAMPLED_TREE, TREE
from fixtures_plots import stand_in
from fixtures_training import NUMBERS, counting_target, random_target, trained_draft
from paceline.cli.__main__ import run as paceline_cli
from paceline.data.chat import ChatFormat
from paceline.decoding import options as opt
from paceline.decoding.api import generate
from paceline.decoding.binding import make_loop, make_row
from paceline.decoding.plan import ProposalPlan
from paceline.drafts._base import DraftNetwork
from paceline.measure.diagnose import NAMES, Reader, count
from paceline.measure.diagnose_run import Witness, diagnose_prompt
from paceline.measure.report import RENDERERS, markdown
from paceline.measure.systems import Sampling
from paceline.records import Tree, Verdict
from paceline.store.checkpoint import DraftInfo, save_draft
from paceline.store.fingerprint import identify_target
from paceline.targets.generic import Target

WORDS = ("hello", "what is one plus two", "name a city", "weather rome")
PLANS = [CHAIN, TREE, SAMPLED_CHAIN, SAMPLED_TREE]


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target()


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    chat = ChatFormat(target.tokenizer)
    return [chat.prompt_ids([{"role": "user", "content": words}]) for words in WORDS]


@pytest.fixture(scope="module")
def drafts(target, prompts) -> dict[str, DraftNetwork]:
    """Two drafts that know some of the target's answers, one better than the other."""
    answers = [generate(target, ids, max_new_tokens=16, temperature=0).rows[0].tokens for ids in prompts]
    texts = [(ids + answer, len(ids)) for ids, answer in zip(prompts, answers, strict=True)]
    taught = {"before": trained_draft(target, texts, steps=20), "after": trained_draft(target, texts, steps=50)}
    return {**taught, "block": tiny_dflash(target)}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["before", "block"])
def test_diagnosis_changes_no_token_and_no_count(plan, temperature, draft, target, prompts, drafts):
    sampling = Sampling(24, temperature)
    for seed, ids in enumerate(prompts[:2]):
        plain = generate(target, ids, draft=drafts[draft], plan=plan, seed=seed, **sampling.options)
        found = diagnose_prompt(target, drafts[draft], ids, plan=plan, sampling=sampling, seed=seed)
        assert found.tokens == plain.rows[0].tokens
        assert found.stats == plain.stats.total
        assert sum(len(each.path) for each in found.rounds) == found.stats.accepted
        counts = count(found.rounds)
        assert counts["greedy_rounds"] == len(found.rounds) > 0 and set(counts) == set(NAMES)


class Seen(Witness):
    """Keeps the tokens of every proposal and verdict beside the rounds."""

    def __init__(self, reader: Reader, *, max_new_tokens: int) -> None:
        super().__init__(reader, max_new_tokens=max_new_tokens)
        self.proposals: list[tuple[list[int], list[int]]] = []

    def count_round(self, index: int, proposal: Tree, row: int, verdict: Verdict) -> None:
        super().count_round(index, proposal, row, verdict)
        self.proposals.append((proposal.tokens[row, : proposal.counts[row]].tolist(), verdict.tokens))


def watch(target: Target, draft: DraftNetwork, ids: list[int], *, plan: ProposalPlan, room: int) -> tuple[Seen, int]:
    """Greedy rounds behind a prompt, and the token that prefill wrote."""
    options = opt.with_sampling(opt.GenerationOptions(max_new_tokens=room, temperature=0.0))
    captured = opt.capture(target.model, torch.tensor([ids]), options=options)
    row = make_row(captured, row=0, index=0, padding=0, seed=0)
    loop = make_loop(draft, target, plan=plan, captured=captured)
    loop.proposer.keeps_laws = True
    loop.stats = seen = Seen(Reader(draft.vocab, plan), max_new_tokens=room)
    list(loop.run([row]))
    return seen, row.new_tokens[0]


def test_the_greedy_path_is_the_chain_that_the_draft_would_propose_there(target, prompts, drafts):
    """Slow twin: a chain drafted anew behind the same context holds the whole greedy path, verified or not."""
    plan, draft, kept = ProposalPlan(depth=3, width=2, nodes=8), drafts["after"], []
    for ids in prompts[:2]:
        seen, first = watch(target, draft, ids, plan=plan, room=14)
        context = [*ids, first]
        for each, (tokens, committed) in zip(seen.rounds, seen.proposals, strict=False):
            again, last = watch(target, draft, context[:-1], plan=ProposalPlan.chain(3), room=8)
            assert last == context[-1]  # every committed token is the target's own greedy one
            chain = again.proposals[0][0][1:]
            greedy = [tokens[node] for node in each.greedy]
            assert greedy == chain[: len(greedy)]
            if len(greedy) < each.depth:
                assert chain[len(greedy)] not in [tokens[child] for child in each.children([0, *each.greedy][-1])]
            kept.append(len(greedy))
            context += committed
    assert min(kept) < 3 == max(kept)  # some are pruned, some are not


def test_a_draft_that_knows_the_text_is_accepted_along_its_greedy_path():
    target = counting_target()
    one = target.tokenizer.convert_tokens_to_ids(NUMBERS)
    texts = [(one[place:] + one + one, 1) for place in range(len(one))]
    draft = trained_draft(target, texts, steps=60)
    found = diagnose_prompt(target, draft, one[:3], plan=ProposalPlan.chain(3), sampling=Sampling(21), seed=0)
    counts = count(found.rounds)
    assert found.tokens == (one * 3)[3:24]
    assert counts["greedy_pruned"] == 0  # a chain of the likeliest tokens is the greedy path
    assert counts["accepting"] == counts["coinciding"]
    assert counts["whole"] == counts["miss_depth"] > counts["greedy_rounds"] / 2
    assert counts["token_9_accepted"] == counts["token_9_n"] > 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target, drafts) -> Path:
    """A target, two drafts and a file of prompts, saved."""
    place = tmp_path_factory.mktemp("saved")
    target.model.save_pretrained(place / "target")
    target.tokenizer.save_pretrained(place / "target")
    for name, draft in drafts.items():
        kind = "dflash" if name == "block" else "eagle3"
        save_draft(place / name, draft, info=DraftInfo(kind, draft.config, identify_target(target)))
    (place / "prompts.jsonl").write_text("".join(json.dumps({"turns": [words]}) + "\n" for words in WORDS))
    return place


def cli(folders: Path, out: Path, *more: str, drafts: tuple[str, ...] = ("before", "after")) -> int:
    named = [part for name in drafts for part in ("--draft", str(folders / name))]
    return paceline_cli(
        [
            "diagnose", "--target", str(folders / "target"), *named, "--workload", str(folders / "prompts.jsonl"),
            "--out", str(out), "--max-new-tokens", "20", "--compile", "off", *more,
        ]
    )  # fmt: skip


FIGURES = (
    "accepted_length", "nodes_per_round", "pruned_share", "greedy_kept_share", "greedy_coincidence",
    "greedy_coincidence_all", "greedy_coincidence_strict", "greedy_whole", "accepting_share",
    "token_calibration_error", "token_excess", "path_calibration_error", "path_excess", "entropy_accepted",
    "entropy_rejected", "entropy_missed", "entropy_behind",
)  # fmt: skip


def test_the_command_puts_drafts_side_by_side_in_one_record(folders, tmp_path, capsys):
    out = tmp_path / "paths.json"
    assert cli(folders, out, "--plan", "tree:3x2:5", "--prompts-per-file", "3") == 0
    record, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert (record["kind"], record["n"], record["identical"]) == ("diagnose", 3, True)
    assert record["plan"] == record["manifest"]["plan"] == "tree 3x2, 5 nodes, ranked"
    assert [draft["name"] for draft in record["drafts"]] == ["before", "after"]
    for draft in record["drafts"]:
        assert set(FIGURES) | {f"{name}_se" for name in FIGURES} <= set(draft)
        assert draft["accepted_length_se"] is not None and 0 < draft["pruned_share"] < 1
        assert draft["about"]["trained_for"]["fingerprint"] == record["manifest"]["target"]["fingerprint"]
        assert set(draft["misses"]) == {"rounds", "ended_by_draft", "reasons", "ranks"}
        assert set(draft["calibration"]) == {"token", "path"} and len(draft["calibration"]["path"]) == 10
        assert set(draft["entropy"]) == {"unit", "counts", "step", "histogram"}
        assert draft["acceptance_by_depth"][0]["depth"] == 1
        assert f"{draft['name']}: acceptance by depth" in shown
    before, after = (draft["accepted_length"] for draft in record["drafts"])
    assert record["differences"][0]["accepted_length"] == pytest.approx(after - before, abs=1e-4)
    for key in ("prompt_digest", "template", "sampling", "seed", "device", "dtype", "threads", "versions", "engine"):
        assert record["manifest"][key] is not None, key
    assert str(folders) not in out.read_text()
    assert all(markdown(table) for table in RENDERERS["diagnose"](record))


@pytest.mark.parametrize("plan", ["chain:3", "tree:3x2:5", "tree:3x2:5:sampled"])
def test_sampling_works_with_every_kind_of_proposal(plan, folders, tmp_path):
    for name in ("a", "b"):
        more = ("--plan", plan, "--temperature", "1.0", "--top-p", "0.9")
        assert cli(folders, tmp_path / name, *more, drafts=("before", "after", "block")) == 0
    records = [json.loads((tmp_path / name).read_text()) for name in ("a", "b")]
    assert records[0]["drafts"] == records[1]["drafts"] and records[0]["identical"] is None
    if plan.startswith("chain"):  # a chain of the likeliest tokens is the greedy path
        assert all(draft["pruned_share"] == 0 for draft in records[0]["drafts"])


def test_pictures_are_written(folders, tmp_path, monkeypatch):
    axes = stand_in(monkeypatch)
    assert cli(folders, tmp_path / "x.json", "--plots", str(tmp_path / "new"), drafts=("after",)) == 0
    kinds = ("acceptance", "calibration", "entropy")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        f"x-{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")
    ]
    draft = json.loads((tmp_path / "x.json").read_text())["drafts"][0]
    token, _, conditional, cumulative = axes.errorbar.call_args_list
    filled = [each for each in draft["calibration"]["token"] if each["count"]]
    assert token.args == ([each["confidence"] for each in filled], [each["accepted"] for each in filled])
    for drawn, kind in ((conditional, "conditional"), (cumulative, "cumulative")):
        assert drawn.args[1] == [row[kind] for row in draft["acceptance_by_depth"]]
    for drawn, side in zip(axes.stairs.call_args_list, ("accepted", "rejected"), strict=True):
        heights, edges = drawn.args
        assert len(edges) == len(heights) + 1
        assert sum(heights) * edges[1] == pytest.approx(1.0) or not any(draft["entropy"]["histogram"][side])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--draft", "ngram"), "found 'ngram', which has no law to look at"),
        (("--draft", "none"), "found 'none', which has no law to look at"),
        (("--draft", "nowhere"), "nowhere"),
        (("--plan", "star:3"), "--plan: found 'star:3'"),
        (("--compile", "fast"), "--compile: found 'fast', expected auto or off"),
        (("--top-p", "0.5"), "top_p is 0.5"),
    ],
)
def test_a_mistake_is_one_line(folders, tmp_path, capsys, more, message):
    assert cli(folders, tmp_path / "a.json", *more) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert cli(folders, tmp_path / "a.json", drafts=("after", "after")) == 2
    assert "is given twice" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_prompts_that_do_not_fit_the_context_are_told(folders, tmp_path, capsys):
    assert cli(folders, tmp_path / "a.json", "--max-new-tokens", "600", drafts=("after",)) == 2
    assert "no prompt fits: the target takes 512 tokens" in capsys.readouterr().err
