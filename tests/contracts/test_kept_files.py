"""What a user keeps is not replaced: not a device, not rows, not a recipe, not another record."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from contracts.test_synth import write as write_synth
from fixtures_models import tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import Onlooker, random_target, recipe_of, write_rows
from paceline.cli.__main__ import MISTAKE, run
from paceline.cli._outputs import check_record_path
from paceline.config import load_recipe
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.measure.ledger import Ledger, side_file
from paceline.store import files
from paceline.store.feature_index import INDEX
from paceline.store.lines import open_lines, read_lines
from paceline.training.capture_run import plan_capture, run_capture
from paceline.training.snapshot import check_identity
from paceline.training.trainer import train

MINE = "mine, for hours"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Devices and pipes


def test_an_out_that_is_a_device_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        for may_replace in (False, True):
            with pytest.raises(ConfigError, match="is a device or a pipe, expected a file; choose another --out"):
                check_record_path(path, may_replace=may_replace)
        for write in (lambda place: files.write_text(place, "x"), open_lines):
            with pytest.raises(ConfigError, match="is a device or a pipe, expected a file"):
                write(path)
    assert pipe.is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_folder_does_not_take_the_place_of_a_file(tmp_path):
    (tmp_path / "draft").write_text(MINE)
    with pytest.raises(FileExistsError), files.folder_aside(tmp_path / "draft") as aside:
        (aside / "x").write_text("x")
    assert contents(tmp_path) == {"draft": MINE.encode()}


# synth and capture


@pytest.mark.parametrize("name", ["rows.jsonl", "dropped.jsonl"])
@pytest.mark.parametrize("text", ['{"index": 0}\n{"torn": ', MINE, '{"index": 0, "reason": "x"}\n'])
def test_synth_does_not_cut_the_users_own_rows(tmp_path, name, text):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is there without the synth\.json of a run; move it"):
        write_synth(out, 10)
    assert contents(out) == {name: text.encode()}


def test_a_folder_of_an_older_synth_without_an_option_goes_on(tmp_path):
    rows = write_synth(tmp_path / "out", 10)
    path = tmp_path / "out" / "synth.json"
    settings = json.loads(path.read_text())
    del settings["top_k"]
    path.write_text(json.dumps(settings))
    assert write_synth(tmp_path / "out", 10) == rows


def test_a_file_whose_lines_are_refused_is_not_cut(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}\n{"torn')
    with pytest.raises(DataError, match=r"x\.jsonl:2"):
        list(read_lines(path, read=lambda line: line["a"]))
    assert path.read_text().endswith("torn")


def test_capture_does_not_remove_shards_of_others(tmp_path):
    recipe = recipe_of(write_rows(tmp_path / "rows.jsonl", count=10))
    out = tmp_path / "out"
    out.mkdir()
    (out / "shard-00000.safetensors").write_text(MINE)
    plan = plan_capture(recipe, dtype="float32", say=lambda line: None, target=random_target())
    with pytest.raises(CheckpointError, match=f"shard-00000.safetensors is there without {INDEX}"):
        run_capture(plan, folder=out, max_disk=None, say=lambda line: None)
    assert contents(out) == {"shard-00000.safetensors": MINE.encode()}


# train


@pytest.mark.parametrize("name", ["recipe.toml", "log.jsonl", "best/draft.toml", "last/x"])
@pytest.mark.parametrize("resume", [False, True])
def test_training_does_not_overwrite_what_is_not_a_runs(tmp_path, name, resume):
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True)
    place.write_text(MINE)
    recipe = recipe_of(write_rows(tmp_path / "rows.jsonl", count=10))
    with pytest.raises(
        ConfigError, match=rf"holds {name.partition('/')[0]} and no run .*choose another --out, or move"
    ):
        train(recipe, out=tmp_path / "out", watch=Onlooker(), target=random_target(), resume=resume)
    assert contents(tmp_path / "out") == {name: MINE.encode()}


def test_a_run_that_kept_nothing_begins_again_with_the_same_command(tmp_path, monkeypatch):
    recipe = recipe_of(write_rows(tmp_path / "rows.jsonl", count=10))
    out, target = tmp_path / "out", random_target()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("paceline.training.trainer.Trainer._count", full)
        train(recipe, out=out, watch=Onlooker(), target=target)
    assert {path.name for path in out.iterdir()} == {"state", "log.jsonl", "recipe.toml"}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("paceline.training.trainer.write_state", full)
        train(recipe, out=out, watch=Onlooker(), target=target)
    assert (out / "best").is_dir() and not list((out / "state").iterdir())
    with pytest.raises(ConfigError, match="holds a run already; pass --resume"):
        train(recipe, out=out, watch=Onlooker(), target=target)
    assert train(recipe, out=out, watch=Onlooker(), target=target, resume=True).steps == 6


def test_a_run_of_before_an_option_is_resumed(tmp_path):
    """Before data.supervise there was one way: "trained with another data.supervise: None, now answers"."""
    expected = {"data.supervise": "answers", "training.betas": [0.9, 0.95], "draft.vocab_size": None, "the rows": "x"}
    check_identity({"the rows": "x"}, expected=expected, where="out", best="best")
    for key, value in (("data.supervise", "all"), ("training.betas", [0.9, 0.99]), ("the rows", "y")):
        with pytest.raises(ConfigError, match=f"another {key}"):
            check_identity({"the rows": "x"}, expected={**expected, key: value}, where="out", best="best")


# bench


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A benchmark of two prompts without its --out."""
    place = tmp_path_factory.mktemp("bench")
    tiny_llama().save_pretrained(place / "target")
    tiny_tokenizer().save_pretrained(place / "target")
    (place / "prompts.jsonl").write_text('{"turns": ["hello"]}\n{"turns": ["bye"]}\n')
    return [
        "bench", "--target", str(place / "target"), "--draft", "ngram", "--workload", str(place / "prompts.jsonl"),
        "--max-new-tokens", "4", "--compile", "off", "--warmup", "0", "--plan", "chain:1", "--plan", "chain:2",
    ]  # fmt: skip


def outs(*paths: Path) -> list[str]:
    return [text for path in paths for text in ("--out", str(path))]


def stopped(monkeypatch, arguments, *, after: int = 1, place: str = "paceline.measure.ledger.Ledger.add") -> None:
    """Run, and stop before conversation `after`, or before record `after`."""
    module, name = place.rsplit(".", 1)
    owner = Ledger if name == "add" else __import__(module, fromlist=[name])
    work, calls = getattr(owner, name), list[object]()

    def counting(*given: object) -> None:
        calls.append(given)
        if len(calls) > after:
            raise KeyboardInterrupt
        work(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counting)
        assert run(arguments) == 130


def test_resume_replaces_no_record_that_was_never_in_the_run(tmp_path, arguments, monkeypatch, capsys):
    a, b, precious = (tmp_path / f"{name}.json" for name in ("a", "b", "precious"))
    precious.write_text(MINE)
    for force in ([], ["--force"]):
        if force:
            a.write_text("old")
        stopped(monkeypatch, [*arguments, *outs(a, b), *force])
        assert run([*arguments, *outs(a, precious), "--resume"]) == MISTAKE
        assert "precious.json exists; choose another --out" in capsys.readouterr().err
        assert precious.read_text() == MINE
        assert run([*arguments, *outs(a, b), "--resume"]) == 0
        assert json.loads(a.read_text())["n"] == json.loads(b.read_text())["n"] == 2
        assert not side_file(a).exists()
        a.unlink()
        b.unlink()


def test_a_file_put_where_a_stopped_run_would_write_is_not_replaced(tmp_path, arguments, monkeypatch):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    stopped(monkeypatch, [*arguments, *outs(a, b)])
    b.write_text(MINE)
    assert run([*arguments, *outs(a, b), "--resume"]) == MISTAKE
    assert b.read_text() == MINE


def test_a_run_stopped_between_its_records_goes_on(tmp_path, arguments, monkeypatch):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    stopped(monkeypatch, [*arguments, *outs(a, b)], place="paceline.cli._bench_run.write_record")
    assert a.exists() and not b.exists()
    assert run([*arguments, *outs(a, b), "--resume"]) == 0
    assert b.exists() and not side_file(a).exists()


@pytest.mark.parametrize("left", ["", '{"settings": {}}\n{"sitting": "x", "replaces": ["a.json"]}\n', '{"sett'])
def test_a_side_file_without_measurements_replaces_nothing(tmp_path, arguments, left, capsys):
    a = tmp_path / "a.json"
    a.write_text(MINE)
    side_file(a).write_text(left)
    assert run([*arguments, *outs(a), "--resume"]) == MISTAKE
    assert "a.json exists" in capsys.readouterr().err
    assert a.read_text() == MINE


@pytest.mark.parametrize("text", [MINE, '{"a": 1}\n', "a download"])
def test_a_partial_file_of_somebody_else_is_not_emptied(tmp_path, arguments, text, capsys):
    side_file(tmp_path / "a.json").write_text(text)
    for more in ([], ["--resume"], ["--force"]):
        assert run([*arguments, *outs(tmp_path / "a.json"), *more]) == MISTAKE
        assert "a.json.partial: not the side file of a benchmark; move it" in capsys.readouterr().err
    assert side_file(tmp_path / "a.json").read_text() == text


def test_a_record_does_not_stand_where_the_measurements_are_kept(tmp_path, arguments, capsys):
    a = tmp_path / "z.json"
    assert run([*arguments, *outs(a, side_file(a))]) == MISTAKE
    assert "is where the measurements of" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# demo


def test_a_demo_into_a_file_is_refused_before_the_fetch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.demo._run", lambda *_: pytest.fail("it has begun"))
    (tmp_path / "file").write_text(MINE)
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "pipe"):
        assert run(["demo", "--out", str(out)]) == MISTAKE
        assert "expected a folder; choose another --out" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == MINE


@pytest.mark.parametrize("name", ['a"b', "a\\nb", "a'b c"])
def test_a_demo_in_a_folder_of_any_name_trains_on_its_own_rows(tmp_path, name, monkeypatch):
    read = list[tuple[str, ...]]()

    def watch(_: object, given: list[str]) -> None:
        read.extend([load_recipe(given[1]).data.train] if given[0] == "train" else [])

    monkeypatch.setattr("paceline.cli.demo._run", watch)
    monkeypatch.setattr("paceline.cli.demo._compare", lambda *_: None)
    assert run(["demo", "--out", str(tmp_path / name)]) == 0
    assert read == [(str(tmp_path / name / "rows" / "rows.jsonl"),)]
