"""A study file becomes cells, and a mistake in it is one line before anything is run."""

from __future__ import annotations

import pytest

from fixtures_study import STUDY, write_study
from house.source import ROOT
from paceline.cli.__main__ import MISTAKE, run
from paceline.config import dump_recipe
from paceline.errors import ConfigError
from paceline.training.study import load_study, study_cells, with_steps


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_study(root)
    return root


def study_of(place, text=STUDY, *changes):
    path = place / "s.toml"
    path.write_text(text.format(root=place))
    return load_study(path, overrides=changes)


def test_cells_come_seed_by_seed_with_the_baseline_first(place):
    cells = study_cells(study_of(place))
    assert [cell.name for cell in cells] == ["ttt-seed0", "short-seed0", "ttt-seed1", "short-seed1"]
    assert [cell.recipe.training.seed for cell in cells] == [0, 0, 1, 1]
    assert cells[1].recipe.objective.options == {"steps": 1}
    assert cells[0].recipe.objective.options == {"steps": 2}
    assert all(cell.recipe.training.steps == 12 and cell.start is None for cell in cells)


def test_a_warm_start_is_for_all_arms_but_one_that_declines(place):
    text = STUDY.replace('name = "ttt"', 'name = "ttt"\nwarm_start = "none"')
    cells = study_cells(study_of(place, text, "study.warm_start=RUN", "study.seeds=[3]"))
    assert {cell.name: cell.start for cell in cells} == {"ttt-seed3": None, "short-seed3": "RUN"}


def test_a_study_is_kept_as_it_was_asked_for(place):
    study = study_of(place, STUDY, "measure.plans=['chain:2']", "pair.plan=chain:2")
    (place / "again.toml").write_text(dump_recipe(study))
    assert load_study(place / "again.toml") == study


def test_other_steps_change_nothing_else(place):
    cell = study_cells(study_of(place))[1]
    other = with_steps(cell, 5)
    assert other.recipe.training.steps == 5 and other.recipe.objective == cell.recipe.objective
    assert other.recipe.training.warmup_steps == cell.recipe.training.warmup_steps


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('baseline = "ttt"', 'baseline = "tt"', "study.baseline: found tt, expected one of the study; did you"),
        ("seeds = [0, 1]", "seedz = [0, 1]", "study.seedz: unknown key; did you mean 'seeds'"),
        ('set = ["obj', 'sett = ["obj', "arms.0.sett: unknown key; did you mean 'set'"),
        ('name = "short"\n', 'name = "a/b"\n', "arms.0.name: found \"a/b\""),
        ('name = "short"\n', 'name = "ttt"\n', "arms.name: found ttt twice, expected each once"),
        ('arm = "short"', 'arm = "ttt"', "pair.arm: found ttt, expected one of the study"),
        ('plan = "tree:2x2:3"', 'plan = "chain:9"', "pair.plan: found chain:9"),
        ('"chain:2"', '"chian:2"', "measure.plans: found 'chian:2', expected chain:LENGTH or tree"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "study.seeds: found 0 twice"),
        ("seeds = [0, 1]", "seeds = []", "study.seeds: found []"),
        ("steps = 1 }}", "stepz = 1 }}", "arm short: the recipe: objective.options.stepz: unknown key"),
        ("objective.options={{", "objectiv.options={{", "arm short: "),
        ("a.jsonl", "c.jsonl", "c.jsonl"),
        ("recipe.toml", "recip.toml", "no such recipe"),
        ('name = "ttt"', 'name = "ttt"\nset = ["training.steps=9"]', "arm short has training.steps = 12, the baseline"),
        ('name = "ttt"', 'name = "ttt"\nset = ["data.max_length=9"]', "arm short has data.max_length = 48, the base"),
        ('name = "ttt"', 'name = "ttt"\nset = ["target.dtype=bfloat16"]', "arm short has another [target]"),
        ('name = "short"', 'name = "short"\nwarm_start = "nowhere"', "arm short: warm_start: no folder 'nowhere'"),
        ('name = "short"', 'name = "short"\ndraft = "x"', "arm short has a finished draft, so set changes nothing"),
        ("temperatures = [0.0, 1.0]", "temperatures = [1.0]", "pair.temperature: found 0"),
        ("temperatures = [0.0, 1.0]", 'temperatures = "hot"', "measure.temperatures: found \"hot\""),
        ("[measure]", "[measure", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_before_anything_is_run(place, capsys, old, new, complaint):
    assert old in STUDY
    (place / "bad.toml").write_text(STUDY.replace(old, new, 1).format(root=place))
    capsys.readouterr()
    assert run(["study", str(place / "bad.toml"), "--out", str(place / "out")]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not (place / "out").exists()


def test_equal_seconds_need_a_number_of_steps(place):
    text = STUDY.replace('name = "short"', 'name = "short"\nequal = "seconds"').replace(
        "training.steps=12", "training.steps="
    )
    with pytest.raises(ConfigError, match=r"expected training\.steps instead of training\.epochs"):
        study_cells(study_of(place, text.replace('"training.steps=",', '"training.steps=", "training.epochs=1",')))


def test_a_folder_of_somebody_else_is_not_taken(place, capsys):
    (place / "mine").mkdir(exist_ok=True)
    (place / "mine" / "letter.txt").write_text("dear")
    assert run(["study", str(place / "study.toml"), "--out", str(place / "mine")]) == MISTAKE
    assert "holds files and no study" in capsys.readouterr().err
    assert [path.name for path in (place / "mine").iterdir()] == ["letter.txt"]


def test_a_pair_without_its_section_is_refused(place, capsys):
    (place / "alone.toml").write_text(STUDY.partition("[pair]")[0].format(root=place))
    arguments = ["study", str(place / "alone.toml"), "--out", str(place / "out"), "--pair", str(place / "p.json")]
    assert run(arguments) == MISTAKE
    assert "has no section [pair]" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "studies").glob("*.toml")), ids=lambda path: path.stem)
def test_every_study_that_comes_with_us_has_cells(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    cells = study_cells(load_study(file))
    assert len(cells) >= 2 and cells[0].recipe is not None
