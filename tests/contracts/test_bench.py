"""The benchmark on tiny targets (K13, K14, K38, K40): equality checked, losses admitted, a stopped run goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from fixtures_drafts import tiny_eagle3
from fixtures_models import GreedyPaths, Scripted, adversary, oracle, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.cli.__main__ import run as paceline_cli
from paceline.data.chat import ChatFormat
from paceline.decoding.api import generate
from paceline.decoding.plan import ProposalPlan
from paceline.errors import ConfigError, DataError, UnsupportedOption
from paceline.measure.bench import Bench, Protocol
from paceline.measure.ledger import Ledger, Observation
from paceline.measure.record import Measurement, build_record
from paceline.measure.systems import BASELINES, Sampling, System, baseline_system, draft_system, plain_system
from paceline.measure.workloads import Workload, ids_digest, load_workload, with_answers
from paceline.store.checkpoint import DraftInfo, save_draft
from paceline.store.fingerprint import identify_target
from paceline.targets.generic import Target

PROMPTS = (["hello", "bye"], ["what is one plus two"], ["name a city"], ["add five six seven"])
GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(), tokenizer=tiny_tokenizer(), name="tiny", compile="off")


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return load_workload([write_prompts(tmp_path / "a.jsonl")], prompts_per_file=40)


def write_prompts(path: Path, turns: tuple[list[str], ...] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    return path


def observe(target: Target, workload: Workload, systems: list[System], record: Path, **protocol) -> list[Observation]:
    sampling = protocol.pop("sampling", GREEDY)
    protocol = Protocol(sampling, **{"warmup": 0, **protocol})
    bench = Bench(target, ChatFormat(target.tokenizer), [plain_system(target, sampling=sampling), *systems], protocol)
    ledger = Ledger(record, settings={}, resume=True)
    found = [each for done in bench.run(workload, ledger=ledger) for each in done]
    ledger.close()
    return found


def record_of(observations: list[Observation], draft: System, *, is_greedy: bool = True) -> dict:
    return build_record(Measurement(observations, draft, [], [], is_greedy, {}))


def test_an_oracle_is_accepted_whole_and_a_slow_draft_is_said_not_to_pay(target, workload, tmp_path):
    perfect = draft_system(target, oracle(target.model), plan=ProposalPlan.chain(3), sampling=GREEDY)
    record = record_of(observe(target, workload, [perfect], tmp_path / "a.json"), perfect)
    assert record["identical"] is True
    assert record["accepted_length"] == pytest.approx(11 / 3, rel=1e-3)  # 12 tokens, one from prefill: 4 + 4 + 3
    assert [row["conditional"] for row in record["acceptance_by_depth"]] == [1.0, 1.0, 1.0]
    paths = GreedyPaths(target.model)

    def slow(context: list[int], length: int) -> list[int]:
        time.sleep(0.05)
        return paths(context, length)

    late = draft_system(target, Scripted(slow), plan=ProposalPlan.chain(1), sampling=GREEDY)
    record = record_of(observe(target, workload, [late], tmp_path / "b.json"), late)
    assert record["identical"] is True
    assert record["s_wall"] < 1
    assert record["verdict"].startswith("Speculation does not pay")


def test_a_changed_token_is_found_and_placed(target, workload, tmp_path):
    honest = plain_system(target, sampling=GREEDY)

    def wrong(ids: list[int], seed: int):
        tokens, stats = honest.decode(ids, seed)
        return [*tokens[:4], (tokens[4] + 1) % 64, *tokens[5:]], stats

    liar = System("liar", "one token off", wrong)
    record = record_of(observe(target, workload, [liar], tmp_path / "a.json"), liar)
    assert record["identical"] is False
    assert {each["position"] for each in record["mismatches"]} == {4}
    assert all(each["gap"] > 1e3 * each["step"] > 0 for each in record["mismatches"])
    short = System("short", "stops early", lambda ids, seed: (honest.decode(ids, seed)[0][:3], None))
    record = record_of(observe(target, workload, [short], tmp_path / "b.json"), short)
    assert {(each["position"], each["other"]) for each in record["mismatches"]} == {(3, None)}


def test_the_order_turns_from_prompt_to_prompt(target, workload, tmp_path):
    called: list[str] = []
    honest = plain_system(target, sampling=GREEDY)

    def noted(name: str) -> System:
        def decode(ids: list[int], seed: int):
            called.append(name)
            return honest.decode(ids, seed)

        return System(name, name, decode)

    protocol = Protocol(GREEDY, warmup=1)
    bench = Bench(target, ChatFormat(target.tokenizer), [noted("plain"), noted("x"), noted("y")], protocol)
    bench.warm_up(workload)
    assert called == ["plain", "x", "y"]
    called.clear()
    ledger = Ledger(tmp_path / "a.json", settings={}, resume=True)
    assert len(list(bench.run(workload, ledger=ledger))) == 4
    ledger.close()
    assert called == ["plain", "x", "y", "x", "y", "plain", "y", "plain", "x", "plain", "x", "y"]


def test_follow_ups_are_asked_after_the_targets_own_answers(target, workload, tmp_path):
    draft = draft_system(target, adversary(target.model), plan=ProposalPlan.chain(2), sampling=GREEDY)
    first = observe(target, workload, [draft], tmp_path / "a.json")
    both = observe(target, workload, [draft], tmp_path / "b.json", all_turns=True)
    assert [(each.conversation, each.turn) for each in both] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    assert [each.prompt_digest for each in both if each.turn == 0] == [each.prompt_digest for each in first]
    chat = ChatFormat(target.tokenizer)
    answer = generate(target, chat.prompt_ids([{"role": "user", "content": "hello"}]), max_new_tokens=12).rows[0].text
    messages = with_answers(workload.conversations[0].prompt, [answer])
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "hello"), ("assistant", answer), ("user", "bye"),
    ]  # fmt: skip
    assert both[1].prompt_digest == ids_digest(chat.prompt_ids(messages))


def test_sampled_runs_are_seeded_and_not_compared(target, workload, tmp_path):
    sampling = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9)
    draft = draft_system(target, oracle(target.model), plan=ProposalPlan.chain(2), sampling=sampling)
    runs = [observe(target, workload, [draft], tmp_path / name, sampling=sampling, seed=3) for name in ("a", "b")]
    counts = [[(each.results[draft.name].rounds, each.results[draft.name].accepted) for each in run] for run in runs]
    assert counts[0] == counts[1]
    assert not any(each.mismatches for each in runs[0])
    assert record_of(runs[0], draft, is_greedy=False)["identical"] is None
    with pytest.raises(UnsupportedOption, match="--baseline hf"):
        baseline_system("hf", target, sampling=sampling)
    with pytest.raises(ConfigError, match="top_p"):
        Sampling(temperature=0.0, top_p=0.5)


def test_a_stopped_run_goes_on_where_it_stopped(target, workload, tmp_path):
    honest = plain_system(target, sampling=GREEDY)
    seen: list[list[int]] = []

    def stops(ids: list[int], seed: int):
        seen.append(ids)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return honest.decode(ids, seed)

    with pytest.raises(KeyboardInterrupt):
        observe(target, workload, [System("x", "x", stops)], tmp_path / "a.json")
    rest = observe(target, workload, [System("x", "x", stops)], tmp_path / "a.json")
    assert [each.conversation for each in rest] == [2, 3]
    ledger = Ledger(tmp_path / "a.json", settings={}, resume=True)
    assert sorted(ledger.done) == [0, 1, 2, 3]
    ledger.close()


@pytest.mark.parametrize("name", BASELINES)
def test_transformers_own_decoders_write_the_same_tokens(target, name):
    ids = ChatFormat(target.tokenizer).prompt_ids([{"role": "user", "content": "what is one plus two"}])
    expected, _ = plain_system(target, sampling=GREEDY).decode(ids, 0)
    tokens, stats = baseline_system(name, target, sampling=GREEDY).decode(ids, 0)
    assert tokens == expected
    assert stats is None
    assert target.model.config.num_hidden_layers == 4


def test_assisted_generation_takes_an_assistant_of_the_same_words(target):
    ids = [3, 4, 5]
    expected, _ = plain_system(target, sampling=GREEDY).decode(ids, 0)
    system = baseline_system("hf-assisted", target, sampling=GREEDY, assistant=tiny_llama(seed=1, layers=2))
    assert system.decode(ids, 0)[0] == expected
    with pytest.raises(ConfigError, match="80 ids, the target has 64"):
        baseline_system("hf-assisted", target, sampling=GREEDY, assistant=tiny_llama(layers=1, vocab=80))
    with pytest.raises(ConfigError, match="did you mean 'hf-assisted'"):
        baseline_system("hf-asisted", target, sampling=GREEDY)


def test_prompts_beyond_the_targets_context_are_left_out(workload, tmp_path):
    target = Target(tiny_llama(max_position_embeddings=20), tokenizer=tiny_tokenizer(), compile="off")
    sampling = Sampling(max_new_tokens=10)
    bench = Bench(target, ChatFormat(target.tokenizer), [plain_system(target, sampling=sampling)], Protocol(sampling))
    assert [each.line for each in bench.too_long(workload)] == [2, 4]
    ledger = Ledger(tmp_path / "a.json", settings={}, resume=False)
    assert [each.line for each in bench.remaining(workload, ledger=ledger)] == [1, 3]
    ledger.close()
    sampling = Sampling(max_new_tokens=30)
    bench = Bench(target, ChatFormat(target.tokenizer), [plain_system(target, sampling=sampling)], Protocol(sampling))
    with pytest.raises(DataError, match="the target takes 20 tokens"):
        bench.warm_up(workload)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A saved target, a draft made for it, and the same target with one weight changed."""
    place = tmp_path_factory.mktemp("saved")
    target = Target(tiny_llama(), tokenizer=tiny_tokenizer(), name="tiny", compile="off")
    draft = tiny_eagle3(target)
    info = DraftInfo("eagle3", draft.config, identify_target(target))
    save_draft(place / "draft", draft, info=info)
    save_draft(place / "short", draft, info=DraftInfo("eagle3", draft.config, info.target, {"max_length": 12}))
    for name in ("target", "changed"):
        target.model.save_pretrained(place / name)
        target.tokenizer.save_pretrained(place / name)
        with torch.no_grad():
            target.model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5
    write_prompts(place / "one.jsonl")
    write_prompts(place / "two.jsonl", (["weather rome"], ["be kind"]))
    return {name: place / name for name in ("draft", "short", "target", "changed", "one.jsonl", "two.jsonl")}


def cli(folders: dict[str, Path], out: Path, *more: str, target: str = "target", draft: str | None = None) -> int:
    return paceline_cli(
        [
            "bench", "--target", str(folders[target]), "--draft", draft or str(folders["draft"]), "--workload",
            str(folders["one.jsonl"]), str(folders["two.jsonl"]), "--prompts-per-file", "2", "--max-new-tokens", "8",
            "--compile", "off", "--warmup", "1", "--out", str(out), *more,
        ]
    )  # fmt: skip


def test_the_command_writes_one_record_for_each_plan(folders, tmp_path, capsys):
    out = tmp_path / "core.json"
    code = cli(folders, out, "--plan", "tree:3x2:5", "--plan", "chain:2", "--baseline", "hf,prompt-lookup")
    assert code == 0
    record, chain = (json.loads(path.read_text()) for path in (out, tmp_path / "core-chain-2.json"))
    assert record["plan"] == record["manifest"]["plan"] == "tree 3x2, 5 nodes, ranked"
    assert chain["plan"] == "chain of 2, ranked"
    assert record["tokens_per_s_plain"] == chain["tokens_per_s_plain"]
    assert record["other_plans"][0]["accepted_length"] == chain["accepted_length"]
    assert list(record["baselines"]) == ["hf", "prompt-lookup"]
    assert all(each["identical"] for each in (record, chain, *record["baselines"].values()))
    assert list(record["per_file"]) == ["one.jsonl", "two.jsonl"]
    assert record["n"] == 4
    assert record["warnings"] == []
    manifest = record["manifest"]
    assert manifest["target"]["fingerprint"] == manifest["draft"]["trained_for"]["fingerprint"]
    assert manifest["sampling"]["is_greedy"] is True
    for key in (
        "prompt_digest",
        "template",
        "seed",
        "device",
        "dtype",
        "threads",
        "versions",
        "cpu",
        "engine",
        "draft",
    ):
        assert manifest[key] is not None, key
    assert str(tmp_path) not in out.read_text()
    assert not list(tmp_path.glob("*.partial"))
    assert record["verdict"] in " ".join(capsys.readouterr().out.split())


def test_a_draft_of_another_target_is_told_and_stays_exact(folders, tmp_path, capsys):
    assert cli(folders, tmp_path / "a.json", target="changed") == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert "was trained for another target" in record["warnings"][0]
    assert record["identical"] is True
    assert "warning: " in capsys.readouterr().out


def test_contexts_longer_than_the_drafts_training_are_told(folders, tmp_path):
    assert cli(folders, tmp_path / "a.json", draft=str(folders["short"])) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert "contexts reach 20 tokens, the draft was trained on up to 12" in record["warnings"][0]
    assert record["identical"] is True
    assert list(record["acceptance_by_prompt_length"]) == ["1-63"]


def test_rows_that_give_no_prompt_are_told(folders, tmp_path, capsys):
    lines = [{"turns": ["hello"]}, {"prompt": "bye"}, {"text": "hi"}, {"question": "hi"}]
    workload = tmp_path / "mine.jsonl"
    workload.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--target", folders["target"], "--draft", "none", "--workload", workload, "--max-new-tokens", "4"]
    assert paceline_cli(["bench", *map(str, arguments), "--out", str(tmp_path / "a.json")]) == 0
    said = "warning: 2 of 4 rows skipped; first: mine.jsonl:3: expected exactly one of messages, conversations, turns"
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert shown.index(said) < shown.index("plain: 2 requests")
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["num_skipped"] == 2 and record["warnings"] == []


def test_prompts_that_do_not_fit_the_context_are_told(folders, tmp_path, capsys):
    workload = write_prompts(tmp_path / "mine.jsonl", (["hello"], ["name a city " * 200]))
    arguments = ["--target", folders["target"], "--draft", "none", "--workload", workload, "--max-new-tokens", "4"]
    assert paceline_cli(["bench", *map(str, arguments), "--out", str(tmp_path / "a.json")]) == 0
    said = "warning: 1 of 2 rows skipped; first: mine.jsonl:2: longer than the target's context"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_finished_record_is_replaced_only_when_asked(folders, tmp_path, capsys):
    out = tmp_path / "a.json"
    assert cli(folders, out, draft="none") == 0
    before = out.read_text()
    for more in ((), ("--resume",)):
        assert cli(folders, out, *more, draft="none") == 2
        assert "a.json exists; choose another --out, or pass --force to replace it" in capsys.readouterr().err
    assert out.read_text() == before
    assert cli(folders, out, "--force", draft="none") == 0
    forced = out.read_text()
    assert json.loads(forced)["manifest"]["command"] and forced != before


def test_thinking_on_and_off_are_two_sets_of_prompts(folders, tmp_path):
    digests = set()
    for name, option in (("on", "--thinking"), ("off", "--no-thinking")):
        assert cli(folders, tmp_path / name, option, "--prompts-per-file", "1", draft="none") == 0
        record = json.loads((tmp_path / name).read_text())
        assert record["manifest"]["template"]["options"] == {"enable_thinking": name == "on"}
        digests.add(record["manifest"]["prompt_digest"])
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plan", "chain"), "--plan: found 'chain', expected chain:LENGTH or tree:DEPTHxWIDTH:NODES"),
        (("--turns", "some"), "--turns: found 'some', expected first or all"),
        (("--baseline", "beam"), "--baseline: no 'beam'; known: hf, prompt-lookup, hf-assisted"),
        (("--assistant", "x"), "--assistant is for --baseline hf-assisted"),
        (("--plan", "chain:2", "--plan", "chain:2"), "chain of 2, ranked is asked for twice"),
        (("--out", "b.json", "--out", "c.json"), "found 3 --out and 1 --plan"),
        (("--template", "x"), "--template: found 'x', expected KEY=VALUE"),
        (("--top-p", "0.5"), "top_p is 0.5"),
        (("--draft", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_is_one_line(folders, tmp_path, capsys, options, message):
    assert cli(folders, tmp_path / "a.json", *options) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("paceline: ") and "\n" not in error
    assert not list(tmp_path.iterdir())
