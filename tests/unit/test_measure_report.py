"""Records and the tables made from them: what is said, what fits, and that documents agree with their records."""

import io
import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors.torch import load_file

from house.source import ROOT
from paceline.cli._tables import drawn
from paceline.cli.results import results
from paceline.errors import DataError
from paceline.measure.excerpt import figures_line, rewrite_excerpt
from paceline.measure.ledger import Mismatch, Observation
from paceline.measure.metrics import Estimate, Measured
from paceline.measure.record import Measurement, build_record, read_records, to_json, verdict, write_record
from paceline.measure.report import bench_tables, rewrite_blocks
from paceline.measure.systems import System
from paceline.measure.table import markdown
from paceline.store.checkpoint import weights_sha256

MANIFEST = {
    "target": {"name": "tiny"}, "draft": {"name": "pattern"}, "files": {"a.jsonl": "0", "b.jsonl": "1"},
    "sampling": {"is_greedy": True, "temperature": 0.0, "top_p": None, "max_new_tokens": 8}, "dtype": "float32",
    "device_name": "a processor", "threads": 1, "engine": "eager", "paceline": "0",
    "versions": {"torch": "2", "transformers": "5"},
}  # fmt: skip


def system(name: str) -> System:
    return System(name, f"about {name}", lambda ids, seed: ([], None))


def observation(number: int, *, draft_wall: float = 0.5, differs: bool = False, length: int = 20) -> Observation:
    results = {
        "plain": Measured(8, 1.0 + number / 100, prefill=0.1, target=0.8, rounds=7, emitted=7),
        "chain": Measured(
            8, draft_wall, prefill=0.1, target=0.3, draft=0.1, rounds=3, emitted=7, accepted=4, drafted=9,
            offered=(3, 2, 1), taken=(2, 1, 1),
        ),
        "tree": Measured(8, 0.4, rounds=2, emitted=7, accepted=5, target=0.2, draft=0.1),
        "hf": Measured(8, 1.1),
    }  # fmt: skip
    mismatches = {"chain": Mismatch(2, 5, 6, 0.0, 1e-6)} if differs else {}
    file = "a.jsonl" if number % 2 else "b.jsonl"
    return Observation(number, 0, file, number, length, "f" * 64, results, mismatches)


def measurement(observations, *, is_greedy=True, draft="chain", manifest=None) -> Measurement:
    return Measurement(
        observations, system(draft) if draft else None, [system("tree")] if draft else [], [system("hf")], is_greedy,
        {**MANIFEST, **(manifest or {})},
    )  # fmt: skip


MANY = [observation(number, length=20 + 30 * number) for number in range(12)]


def test_every_row_keeps_its_name_on_a_narrow_terminal():
    out = io.StringIO()
    console = Console(file=out, width=80)
    for table in bench_tables(build_record(measurement(MANY))):
        console.print(drawn(table))
        for row in table.rows:
            assert row[0].split()[0] in out.getvalue(), table.title
    assert "\u2026" not in out.getvalue()


def test_a_record_holds_what_the_issue_names():
    record = build_record(measurement(MANY))
    assert record["identical"] is True
    assert record["rounds"] == 36
    assert record["accepted_length"] == pytest.approx(7 / 3, rel=1e-5)
    assert record["accepted_drafted"] == pytest.approx(4 / 3, rel=1e-5)
    assert record["drafted_share"] == pytest.approx(4 / 7, rel=1e-5)
    assert record["s_wall"] == pytest.approx(sum(1 + number / 100 for number in range(12)) / 6, rel=1e-5)
    for name in ("accepted_length", "s_wall", "s_model", "s_decode", "tokens_per_s_plain", "tokens_per_s_draft"):
        assert record[f"{name}_se"] is not None
    assert [row["cumulative"] for row in record["acceptance_by_depth"]] == pytest.approx(
        [2 / 3, 1 / 3, 1 / 3], rel=1e-5
    )
    assert {name: group["n"] for name, group in record["per_file"].items()} == {"b.jsonl": 6, "a.jsonl": 6}
    assert {name: group["n"] for name, group in record["acceptance_by_prompt_length"].items()} == {
        "1-63": 2, "64-127": 2, "128-255": 4, "256-511": 4,
    }  # fmt: skip
    assert record["other_plans"][0]["plan"] == "tree"
    assert record["baselines"]["hf"]["s_wall"] < 1
    assert sum(record["time_shares"]["draft"].values()) == pytest.approx(1)
    assert json.loads(to_json(record)) == record


def test_columns_of_requests_give_the_pooled_figures_again():
    record = build_record(measurement(MANY))
    columns = record["requests"]
    assert sum(columns["plain_wall"]) / sum(columns["draft_wall"]) == pytest.approx(record["s_wall"], rel=1e-4)
    assert 1 + sum(columns["accepted"]) / sum(columns["rounds"]) == pytest.approx(record["accepted_length"], rel=1e-4)


def test_a_different_output_is_said_and_shown():
    record = build_record(measurement([*MANY, observation(12, differs=True)]))
    assert record["identical"] is False
    assert "OUTPUTS DIFFER on 1 prompts" in record["verdict"]
    assert record["mismatches"][0] | {"gap": 0.0, "plain": 5, "other": 6} == record["mismatches"][0]
    assert "NO" in markdown(bench_tables(record)[1])


def test_sampled_outputs_are_not_compared():
    record = build_record(measurement(MANY, is_greedy=False))
    assert record["identical"] is None
    assert "not comparable" in markdown(bench_tables(record)[1])


def test_plain_decoding_alone_is_a_record_too():
    record = build_record(measurement(MANY, draft=None))
    assert record["plan"] is record["identical"] is record["s_wall"] is record["accepted_length"] is None
    assert record["tokens_per_s_plain"] > 0
    assert record["acceptance_by_depth"] == []
    assert record["verdict"].startswith("No draft")
    assert all(table.rows for table in bench_tables(record))


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (Estimate(0.8, 0.02, 0.76, 0.84), "Speculation does not pay: 0.80x"),
        (Estimate(1.02, 0.03, 0.96, 1.08), "not shown to pay: 1.02x plain decoding .* includes 1"),
        (Estimate(0.98, 0.03, 0.92, 1.04), "not shown to pay"),
        (Estimate(1.5, 0.03, 1.44, 1.56), "Speculation pays: 1.50x"),
        (Estimate(0.9), "did not pay: 0.90x .* without an error"),
        (Estimate(None), "Nothing was decoded"),
    ],
)
def test_the_verdict_is_plain(speed, words):
    assert re.search(words, verdict({"s_wall": speed}, identical=True, name="chain", mismatches=0))


def test_nothing_measured_is_refused():
    with pytest.raises(DataError, match="nothing was measured"):
        build_record(measurement([]))


def test_a_record_stays_under_its_limit_and_says_what_it_left_out(tmp_path, monkeypatch):
    long = [observation(number) for number in range(200)]
    path = tmp_path / "record.json"
    write_record(path, build_record(measurement(long)))
    assert json.loads(path.read_text())["requests"] is not None
    assert path.stat().st_size < 30_000
    monkeypatch.setattr("paceline.measure.record.MAX_BYTES", 15_000)
    write_record(path, build_record(measurement(long)))
    assert path.stat().st_size < 15_000
    record = json.loads(path.read_text())
    assert record["requests"] is None
    assert "left out" in record["warnings"][-1]
    with pytest.raises(DataError, match="at most 15000"):
        write_record(path, build_record(measurement(MANY, manifest={"files": {"x" * 15_000: "0"}})))
    assert json.loads(path.read_text()) == record


DOCUMENT = (
    "# Title\n\n<!-- results:core -->\nold\n<!-- /results -->\ntext\n<!-- results:core-summary -->\n<!-- /results -->\n"
)


def test_blocks_are_made_anew_and_the_rest_is_left_alone():
    records = {"core-a": build_record(measurement(MANY)), "other-b": {"kind": "bench"}}
    once = rewrite_blocks(DOCUMENT, records=records)
    assert rewrite_blocks(once, records=records) == once
    assert once.startswith("# Title\n\n<!-- results:core -->\n")
    assert "old" not in once
    assert "\ntext\n" in once
    assert once.count("### core-a") == 1
    assert once.count("Speculation pays") == 2
    assert "other-b" not in once


def test_a_block_without_a_record_says_so():
    assert rewrite_blocks(DOCUMENT, records={}).count("Not measured yet: no record `core-*.json`.") == 2


def test_blocks_that_cannot_be_filled_are_refused():
    with pytest.raises(DataError, match="not closed"):
        rewrite_blocks("<!-- results:core -->\n", records={})
    with pytest.raises(DataError, match="core-x: unknown kind of record 'tea'"):
        rewrite_blocks(DOCUMENT, records={"core-x": {"kind": "tea"}})


def test_a_broken_record_is_named(tmp_path):
    (tmp_path / "core-x.json").write_text("{")
    with pytest.raises(DataError, match=r"core-x\.json: not JSON"):
        read_records(tmp_path)


def test_the_command_rewrites_and_checks(tmp_path, capsys):
    import typer

    write_record(tmp_path / "core-a.json", build_record(measurement(MANY)))
    document = tmp_path / "page.md"
    document.write_text(DOCUMENT)
    with pytest.raises(typer.Exit) as stale:
        results([document], records=tmp_path, check=True)
    assert stale.value.exit_code == 1
    assert document.read_text() == DOCUMENT
    results([document], records=tmp_path, check=False)
    results([document], records=tmp_path, check=True)
    assert "1 records, 1 documents, stale: none" in capsys.readouterr().out
    assert "### core-a" in document.read_text()


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_documents_agree_with_the_committed_records(document):
    text = (ROOT / document).read_text("utf-8")
    records = read_records(ROOT / "docs" / "results")
    assert rewrite_blocks(text, records=records) == text, "run: make results"


def test_a_verify_cost_record_shows_both_engines_and_the_limit():
    def cost(engine, nodes, median):
        return {
            "engine": engine, "nodes": nodes, "calls": 3, "median": median, "lowest": median / 2, "limit": 0.01,
            "times_limit": median / 0.01, "times_one": 1.0,
        }  # fmt: skip

    record = {
        "kind": "verify-cost",
        "machine": {"read_gb_per_s": 20.0, "gflop_per_s": 240.0},
        "costs": [cost("native", 8, 0.02), cost("eager", 8, 0.05), cost("native", 1, 0.015), cost("eager", 1, 0.03)],
        "manifest": {"threads": 2, "notes": {"target": "t", "context": 256}},
    }
    text = rewrite_blocks(DOCUMENT, records={"core-verify": record})
    assert "| 8 | 50.0 (25.0) | 20.0 (10.0) | 10.0 | 5.00 | 2.00 | 1.00 | 1.00 |" in text
    assert text.index("| 1 |") < text.index("| 8 |")


def test_an_excerpt_is_made_anew_from_the_record_that_it_names(tmp_path, capsys):
    record = build_record(measurement(MANY))
    write_record(tmp_path / "core-a.json", record)
    page = tmp_path / "elsewhere" / "measured.json"
    page.parent.mkdir()
    page.write_text('{"record": "core-a", "s_wall": 9.9}')
    results([page], records=tmp_path, check=False)
    excerpt = json.loads(page.read_text())
    assert excerpt["s_wall"] == record["s_wall"] and excerpt["draft"] == {"name": "pattern", "fingerprint": None}
    assert figures_line(excerpt) == figures_line(record)
    results([page], records=tmp_path, check=True)
    assert "1 documents, stale: none" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"record": "core-b"}', '{"record": ["core-a"]}'])
def test_an_excerpt_of_no_record_is_one_line(text):
    with pytest.raises(DataError, match="an excerpt") as caught:
        rewrite_excerpt(text, records={"core-a": {"kind": "verify-cost"}})
    assert "\n" not in str(caught.value)


def test_the_shipped_excerpt_agrees_with_its_record_and_its_draft():
    """Otherwise the demo states what was measured with other weights."""
    folder = ROOT / "src/paceline/shipped/smollm2-eagle3"
    text = (folder / "measured.json").read_text("utf-8")
    assert rewrite_excerpt(text, records=read_records(ROOT / "docs" / "results")) == text, "run: make results"
    weights = load_file(folder / "draft.safetensors")
    stand_in = SimpleNamespace(state_dict=lambda: weights)
    assert json.loads(text)["draft"]["fingerprint"] == weights_sha256(stand_in)


@pytest.mark.parametrize("broken", [{"manifest": {}}, {"manifest": None}, {"plan": ...}, {"n": ...}], ids=str)
def test_a_record_that_lacks_something_is_named(broken):
    """A traceback from the middle of a table helps nobody."""
    changed = {**build_record(measurement(MANY)), **broken}
    record = {key: value for key, value in changed.items() if value is not ...}
    for rewrite, document in ((rewrite_blocks, DOCUMENT), (rewrite_excerpt, '{"record": "core-a"}')):
        with pytest.raises(DataError, match="the record core-a cannot be used: ") as caught:
            rewrite(document, records={"core-a": record})
        assert "\n" not in str(caught.value)
