"""`paceline synth --prompts`: the target answers what it is given, all of it, once, and says what it left out."""

from __future__ import annotations

import json
import os
import signal
import sys
from io import FileIO
from pathlib import Path

import pytest

import paceline
from fixtures_hub import fake_datasets
from fixtures_kill import in_child
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.cli import __main__ as cli
from paceline.data import synth_run

SYSTEM, HELLO = {"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}
LONG = "add " * 40
FORMS = {
    "messages": {"messages": [SYSTEM, HELLO, {"role": "assistant", "content": "bye"}, {**HELLO, "content": "yes"}]},
    "conversations": {"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hello"}]},
    "turns": {"turns": ["hello", "bye"], "category": "talk"},
    "prompt": {"prompt": "hello"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(initializer_range=0.15).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def arguments(target: Path, out: Path, *prompts: object, more: tuple[object, ...] = ()) -> list[str]:
    given = [text for each in prompts for text in ("--prompts", each)]
    limits = ["--max-answer-tokens", 8, "--max-prompt-tokens", 24, "--slots", 4, "--threads", 1]
    return [str(each) for each in ("synth", "--target", target, "--out", out, *limits, *given, *more)]


def synth(target: Path, out: Path, *prompts: object, more: tuple[object, ...] = ()) -> list[dict]:
    assert cli.run(arguments(target, out, *prompts, more=more)) == 0
    return sorted(lines(out / "rows.jsonl"), key=lambda row: row["index"])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def many(path: Path, count: int) -> Path:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    return write(path, *({"prompt": f"{words[i // 100]} {words[i // 10 % 10]} {words[i % 10]}"} for i in range(count)))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_prompt_is_answered(form: str, target: Path, tmp_path: Path) -> None:
    rows = synth(target, tmp_path / "out", write(tmp_path / "a.jsonl", FORMS[form]), more=("--sampled-share", 0))
    asked = [SYSTEM, HELLO] if form in ("messages", "conversations") else [HELLO]
    assert [row["messages"][:-1] for row in rows] == [asked]
    assert rows[0]["category"] == FORMS[form].get("category", "")
    loaded = make_target(tiny_llama(initializer_range=0.15), tokenizer=tiny_tokenizer())
    plain = paceline.generate(loaded, asked, max_new_tokens=8)
    assert plain.rows[0].text == rows[0]["messages"][-1]["content"]


def test_prompts_of_the_hub_are_answered(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [{"question": "hello"}, {"question": None}, {"question": "bye"}])
    source = "hub:me/set?column=question&split=test"
    rows = synth(target, tmp_path / "out", source)
    assert [row["messages"][0]["content"] for row in rows] == ["hello", "bye"]
    assert lines(tmp_path / "out" / "dropped.jsonl")[0]["prompt"] == f"{source}:2"
    assert json.loads((tmp_path / "out" / "synth.json").read_text())["prompts"] == [f"{source} c0ffee"]


@pytest.mark.parametrize("command", ["synth", "bench"])
def test_a_missing_datasets_package_is_one_line(command, target, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    bench = ["bench", "--target", target, "--draft", "none", "--workload", "hub:me/set", "--out", tmp_path / "a.json"]
    given = {"synth": arguments(target, tmp_path / "out", "hub:me/set"), "bench": [str(each) for each in bench]}
    assert cli.run(given[command]) == cli.MISTAKE
    error = capsys.readouterr().err
    assert error == "paceline: Hub data sets need the package `datasets`; run: pip install datasets\n"
    assert not list(tmp_path.iterdir())


def test_bench_decodes_prompts_of_the_hub(target, tmp_path, monkeypatch) -> None:
    fake_datasets(monkeypatch, [{"prompt": "hello"}, {"prompt": "bye"}])
    bench = ["bench", "--target", target, "--draft", "none", "--workload", "hub:me/set?split=test", "--out"]
    more = ["--max-new-tokens", "4", "--warmup", "0", write(tmp_path / "b.jsonl", {"prompt": "yes"})]
    assert cli.run([str(each) for each in (*bench, tmp_path / "a.json", *more)]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert list(record["manifest"]["files"]) == ["hub:me/set?split=test", "b.jsonl"]
    assert record["manifest"]["files"]["hub:me/set?split=test"] == "c0ffee"
    assert record["n"] == 3


def test_prompts_that_are_left_out_are_named_and_counted(target, tmp_path, capsys) -> None:
    first = write(tmp_path / "a.jsonl", {"prompt": "hello"}, {"prompt": LONG}, {"text": "?"}, {"prompt": "hello"})
    second = write(tmp_path / "b.jsonl", {"prompt": LONG})
    rows = synth(target, tmp_path / "out", first, second)
    assert [row["index"] for row in rows] == [0]
    dropped = {line["prompt"]: (line["index"], line["reason"]) for line in lines(tmp_path / "out" / "dropped.jsonl")}
    assert {name: index for name, (index, _) in dropped.items()} == {"a.jsonl:2": 1, "a.jsonl:3": 2, "a.jsonl:4": 3,
                                                                     "b.jsonl:1": 4}  # fmt: skip
    assert dropped["b.jsonl:1"][1].startswith("longer than 24 tokens: ")
    said = capsys.readouterr().out
    assert "prompts dropped: 2 x longer than 24 tokens, 1 x expected exactly one of" in said
    assert "1 x already asked" in said and "all prompts are used up" in said
    synth(target, tmp_path / "out", first, second)  # once more: nothing is added
    assert "2 x longer than 24 tokens" in capsys.readouterr().out
    assert len(lines(tmp_path / "out" / "rows.jsonl")) == 1 and len(lines(tmp_path / "out" / "dropped.jsonl")) == 4


def test_one_question_under_two_system_turns_is_asked_twice(target, tmp_path) -> None:
    plain = {"messages": [HELLO]}
    assert len(synth(target, tmp_path / "out", write(tmp_path / "a.jsonl", FORMS["messages"], plain))) == 2


def test_no_prompt_that_fits_is_one_line(target, tmp_path, capsys) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": LONG}, {"prompt": LONG + "a"})
    for _ in range(2):  # a folder that holds the drops says the same
        assert cli.run(arguments(target, tmp_path / "out", path)) == cli.MISTAKE
        error = capsys.readouterr().err
        assert error.startswith("paceline: none of the 2 rows of a.jsonl can be answered") and error.count("\n") == 1
        assert "--max-prompt-tokens" in error


def test_answers_stop_at_answer_tokens_and_go_on_later(target, tmp_path, capsys) -> None:
    path = many(tmp_path / "a.jsonl", 40)
    few = synth(target, tmp_path / "out", path, more=("--answer-tokens", 40))
    assert 40 <= sum(row["answer_tokens"] for row in few) < 40 + 8 * 4
    assert "stopped at --answer-tokens 40" in capsys.readouterr().out
    rows = synth(target, tmp_path / "out", path)
    assert [row["index"] for row in rows] == list(range(40))
    assert [row for row in rows if row["index"] in {each["index"] for each in few}] == few
    assert 0 < sum(row["temperature"] > 0 for row in rows) < 40
    assert rows == synth(target, tmp_path / "whole", path)


def test_prompts_killed_in_the_middle_are_all_answered_once(target: Path, tmp_path: Path) -> None:
    path, out = many(tmp_path / "a.jsonl", 60), tmp_path / "out"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": LONG}) + "\n")
    assert in_child(lambda: die_in_row(7, arguments(target, out, path))) == -signal.SIGKILL
    *before, torn = (out / "rows.jsonl").read_bytes().splitlines(keepends=True)
    assert len(before) == 6 and not torn.endswith(b"\n")
    rows = synth(target, out, path)
    assert [row["index"] for row in rows] == list(range(60))
    assert (out / "rows.jsonl").read_bytes().splitlines(keepends=True)[:6] == before
    assert [line["index"] for line in lines(out / "dropped.jsonl")] == [60]
    assert rows == synth(target, tmp_path / "whole", path)


def die_in_row(number: int, given: list[str]) -> None:
    """Run a command and kill this process in the middle of writing its `number`-th row."""
    append, written = synth_run.append_line, []

    def counting(file: FileIO, row: dict) -> None:
        written.append(row)
        if len(written) == number:
            file.write(b'{"index": 7, "messa')
            os.kill(os.getpid(), signal.SIGKILL)
        append(file, row)

    synth_run.append_line = counting
    cli.run(given)


@pytest.mark.parametrize("change", ["content", "order", "own", "given"])
def test_a_folder_of_other_prompts_is_refused_by_name(change, target, tmp_path, capsys) -> None:
    paths = [write(tmp_path / "a.jsonl", {"prompt": "hello"}), write(tmp_path / "b.jsonl", {"prompt": "bye"})]
    if change == "given":
        synth(target, tmp_path / "out", more=("--answer-tokens", 1))  # the target writes its own
    else:
        synth(target, tmp_path / "out", *paths)
    if change == "content":
        write(paths[0], {"prompt": "yes"})
    now = {"order": paths[::-1], "own": []}.get(change, paths)
    capsys.readouterr()
    assert cli.run(arguments(target, tmp_path / "out", *now)) == cli.MISTAKE
    error = capsys.readouterr().err
    assert "out: was written with prompts = " in error and "another --out" in error and error.count("\n") == 1
    assert "a.jsonl" in error


def test_a_data_set_that_changed_is_refused_until_it_is_pinned(target, tmp_path, monkeypatch, capsys) -> None:
    fake_datasets(monkeypatch, [{"prompt": "hello"}])
    rows = synth(target, tmp_path / "out", "hub:me/set")
    fake_datasets(monkeypatch, [{"prompt": "hello"}], commit="beef")
    assert cli.run(arguments(target, tmp_path / "out", "hub:me/set")) == cli.MISTAKE
    assert "prompts = ['hub:me/set c0ffee'], now ['hub:me/set beef']" in capsys.readouterr().err
    assert synth(target, tmp_path / "out", "hub:me/set?revision=c0ffee") == rows


def test_mistakes_in_prompts_are_one_line(target, tmp_path, capsys) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "hello"})
    for given, said in (
        (arguments(target, tmp_path / "out", path, more=("--seeds", path)), "--seeds is for prompts that the target"),
        (arguments(target, tmp_path / "out", tmp_path / "no.jsonl"), "cannot read "),
        (arguments(target, tmp_path / "out", path, path), "a.jsonl is given twice"),
        (arguments(target, tmp_path / "out", "hub:me/set?slit=x"), "unknown slit"),
    ):
        assert cli.run(given) == cli.MISTAKE
        error = capsys.readouterr().err
        assert said in error and error.startswith("paceline: ") and error.count("\n") == 1
        assert not (tmp_path / "out").exists()
