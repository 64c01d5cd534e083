"""`paceline train` and `paceline capture` from the command line: a whole run, and mistakes in one line."""

import json

import pytest

from fixtures_commands import parse
from fixtures_models import tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import RECIPE, write_rows
from paceline.cli.__main__ import MISTAKE, run
from paceline.cli.capture import parse_size
from paceline.errors import ConfigError
from paceline.store.checkpoint import load_draft
from paceline.store.files import Claim


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a target in a folder."""
    folder = tmp_path / "target"
    tiny_llama(layers=3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    rows = write_rows(tmp_path / "rows.jsonl", count=20)
    path = tmp_path / "recipe.toml"
    path.write_text(f'[target]\nname = "{folder}"\n' + RECIPE.format(rows=rows))
    return path


def test_a_run_from_the_command_line(tmp_path, recipe, capsys):
    out = tmp_path / "out"
    assert (
        run(["train", str(recipe), "--out", str(out), "--set", "training.steps=4", "-s", "training.save_every=2"]) == 0
    )
    shown = capsys.readouterr().out
    for expected in ("20 rows accepted", "held out", "40 of 64 words", "run: 4 steps", "step 2: loss", "in an epoch"):
        assert expected in shown, expected
    assert "the draft is not useful yet" in shown
    assert {path.name for path in out.iterdir()} == {"best", "last", "state", "log.jsonl", "recipe.toml"}
    assert "steps = 4" in (out / "last" / "recipe.toml").read_text()
    assert json.loads((out / "last" / "manifest.json").read_text())["command"]
    assert run(["train", str(recipe), "--out", str(out), "-s", "training.steps=4"]) == MISTAKE
    assert "holds a run already; pass --resume" in capsys.readouterr().err
    assert run(["train", str(recipe), "--out", str(out), "-s", "training.steps=4", "--resume"]) == 0
    assert "resumed at step 4 of 4" in capsys.readouterr().out
    arguments = ["train", str(recipe), "--out", str(tmp_path / "next"), "--init-from", str(out / "last")]
    assert run([*arguments, "-s", "training.steps=2"]) == 0
    assert "starts from last, with its vocabulary of 40 words" in capsys.readouterr().out


def test_a_block_draft_from_the_command_line(tmp_path, recipe, capsys):
    out = tmp_path / "out"
    changes = ["draft.name=dflash", "objective.name=dflash", 'objective.options={weights="dpace"}', "training.steps=2"]
    changes += ["training.precision=bf16"]
    assert run(["train", str(recipe), "--out", str(out), *(part for change in changes for part in ("-s", change))]) == 0
    shown = capsys.readouterr().out
    assert "draft: dflash" in shown and "40 of 64 words" in shown
    loaded = load_draft(out / "last")
    assert loaded.info.config.mask_token_id == tiny_tokenizer().pad_token_id
    changes[1:] = ["validation.depth=9"]
    arguments = [part for change in changes for part in ("-s", change)]
    assert run(["train", str(recipe), "--out", str(tmp_path / "next"), *arguments]) == MISTAKE
    assert "validation.depth is 9; a block of 8 says 7 tokens" in capsys.readouterr().err
    assert not (tmp_path / "next").exists()


def test_a_run_of_another_draft_and_objective_from_the_command_line(tmp_path, recipe, capsys):
    out = tmp_path / "out"
    changes = ["draft.name=eagle2", "objective.name=hass", "objective.options={passes = 2}", "training.steps=4"]
    arguments = ["train", str(recipe), "--out", str(out), *(word for change in changes for word in ("-s", change))]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "draft: eagle2" in shown and "40 of 64 words" in shown and "taps 3" in shown and "step 4: loss" in shown
    assert load_draft(out / "last").draft.vocab.size == 40
    eagle3 = ["train", str(recipe), "--out", str(tmp_path / "no"), "-s", "objective.name=hass"]
    assert run([*eagle3, "-s", "objective.options={}"]) == MISTAKE
    error = capsys.readouterr().err
    assert "objective hass" in error and "Eagle3 makes none" in error and error.count("\n") == 1


def test_a_capture_from_the_command_line(tmp_path, recipe, capsys):
    features = tmp_path / "features"
    assert run(["capture", str(recipe), "--out", str(features), "--estimate"]) == 0
    assert " kB, taps 0, 1, 2" in capsys.readouterr().out
    assert not features.exists()
    assert run(["capture", str(recipe), "--out", str(features), "--max-disk", "50KB"]) == 1
    assert "stopped at --max-disk 50KB: run again with more room" in capsys.readouterr().out
    assert run(["capture", str(recipe), "--out", str(features)]) == 0
    shown = capsys.readouterr().out
    assert "20 of 20 examples" in shown
    next_one = parse(shown.rpartition("next: ")[2].strip())
    assert next_one["changes"] == [f"data.features={features}"]
    arguments = ["train", str(recipe), "--out", str(tmp_path / "out"), "-s", f"data.features={features}"]
    assert run([*arguments, "-s", "training.steps=2"]) == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("training.steps=0", "training.steps: found 0"),
        ("training.stepz=1", "training.stepz: unknown key; did you mean 'steps'"),
        ("data.train=[]", "data.train is empty"),
        ("data.max_length=9", "no row is left to train on"),
        ("training.tokens_per_batch=8", "tokens exceeds a batch of 8"),
        ("objective.options={stepz = 3}", "objective.options.stepz: unknown key"),
        ("draft.name=eagle4", "no 'eagle4'; did you mean 'eagle3'"),
        ("draft.options={taps = [9]}", "draft.options.taps"),
        ('training.trackers=["tensorboard"]', "pip install tensorboard"),
        ("data.features=nowhere", "features.json is missing"),
        (f"data.features={__file__}", "features.json is missing"),
        ("draft.name=ngram", "no weights to train; expected one of dflash, eagle2, eagle3"),
        ("draft.name=.x", "found '.x', expected a plug-in's name"),
        ("draft.name=paceline.training.objectives.ttt", "exports a ObjectivePlugin as PLUGIN; expected a DraftPlugin"),
        (f"target.name={'a' * 5000}", "no such target"),
    ],
)
def test_a_mistake_is_one_line_before_any_work_is_lost(tmp_path, recipe, capsys, monkeypatch, change, complaint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["train", str(recipe), "--out", str(tmp_path / "out"), "--set", change]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_recipe(tmp_path, capsys):
    assert run(["train", "absent.toml", "--out", str(tmp_path)]) == MISTAKE
    assert "absent.toml: no such recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("5MB", 5_000_000), ("1.5 gb", 1_500_000_000), ("4096", 4096), ("7 kb", 7000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "five", "5 XB", "nan", "inf", "-5", "0", "1e400MB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="expected a size such as 500MB"):
        parse_size(text)


def test_a_second_training_into_one_folder_is_refused(tmp_path, recipe, capsys):
    out = tmp_path / "out"
    with Claim(out):
        assert run(["train", str(recipe), "--out", str(out), "-s", "training.steps=2"]) == MISTAKE
    assert f"another process writes to {out}; wait for it, or choose another --out" in capsys.readouterr().err
    assert not list(out.iterdir())
    assert run(["train", str(recipe), "--out", str(out), "-s", "training.steps=2"]) == 0


def test_a_run_with_another_vocabulary_is_refused_by_name_and_gets_its_own_map_elsewhere(tmp_path, recipe, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    wide = ["train", str(recipe), "-s", "training.steps=2", "-s", "draft.vocab_size=24", "--out"]
    assert run(["train", str(recipe), "-s", "training.steps=2", "-s", "draft.vocab_size=16", "--out", str(out)]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for more, complaint in (([], f"{out} holds a run already"), (["--resume"], "another draft.vocab_size: 16, now 24")):
        capsys.readouterr()
        assert run([*wide, str(out), *more]) == MISTAKE
        error = capsys.readouterr().err
        assert complaint in error and str(out) in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert run([*wide, str(other)]) == 0
    narrow, map_ = (load_draft(folder / "last").draft.vocab for folder in (out, other))
    assert (narrow.size, map_.size) == (16, 24)
    assert set(narrow.ids.tolist()) < set(map_.ids.tolist()) and bool((map_.ids.diff() > 0).all())
    assert set(tiny_tokenizer().all_special_ids) <= set(map_.ids.tolist())
