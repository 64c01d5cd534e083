"""What a recipe will need, from shapes alone; every recipe that comes with us, without weights or network."""

from __future__ import annotations

import pytest

from fixtures_models import tiny_llama
from fixtures_study import write_study
from house.source import ROOT
from paceline.cli.__main__ import MISTAKE, run
from paceline.config import TargetSection, load_recipe
from paceline.errors import ConfigError, TargetError
from paceline.store.architecture import read_architecture
from paceline.training.forecast import forecast

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
# Hidden, inner, key heads x width, V, W, layers, taps: as published; parameters of the target in thousand millions.
PUBLISHED = {
    "llama-3.1-8b-eagle3": (4096, 14336, 1024, 32000, (1, 15, 28), 8.03),
    "llama-3.3-70b-eagle3": (8192, 28672, 1024, 32000, (1, 39, 76), 70.55),
    "vicuna-13b-eagle3": (5120, 13824, 5120, 32000, (1, 19, 36), 13.02),
    "deepseek-r1-llama-8b-eagle3": (4096, 14336, 1024, 32000, (1, 15, 28), 8.03),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_forecast_without_weights(recipe, capsys):
    assert run(["forecast", str(recipe), "--devices", "8"]) == 0
    shown = capsys.readouterr().out
    settings = load_recipe(recipe)
    assert f"optimiser steps: {settings.training.steps:,}" in shown
    tokens = settings.training.tokens_per_batch * settings.training.accumulation * 8
    assert f"tokens of the run, at most: {tokens * settings.training.steps:,}" in shown
    for expected in ("hours of each device: ", "draft weights, float32", "lm_head.weight", "captured states"):
        assert expected in shown, expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_targets_have_the_published_shapes(name):
    path = ROOT / "recipes" / f"{name}.toml"
    recipe = load_recipe(path)
    found = forecast(recipe, read_architecture(recipe.target, recipes=[path]))
    hidden, inner, keys, words, taps, parameters = PUBLISHED[name]
    assert found.shapes["fc.weight"] == (hidden, 3 * hidden)
    assert found.shapes["midlayer.self_attn.q_proj.weight"] == (hidden, 2 * hidden)
    assert found.shapes["midlayer.self_attn.k_proj.weight"] == (keys, 2 * hidden)
    assert found.shapes["midlayer.mlp.gate_proj.weight"] == (inner, hidden)
    assert found.shapes["lm_head.weight"] == (words, hidden)
    assert found.taps == taps
    assert found.target_parameters / 1e9 == pytest.approx(parameters, abs=0.01)
    assert found.passes == 7 and recipe.training.betas == (0.9, 0.95)


@pytest.fixture
def place(tmp_path):
    write_study(tmp_path)
    return tmp_path


def test_a_forecast_counts_what_a_real_run_has(place):
    recipe = load_recipe(place / "recipe.toml")
    architecture = read_architecture(recipe.target)
    model = tiny_llama(layers=3)
    assert architecture.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert architecture.num_multiplied == architecture.num_parameters - 64 * 32  # without the embedding's rows
    assert all(weight.is_meta for weight in architecture.model.parameters())
    found = forecast(recipe, architecture)
    assert found.shapes["lm_head.weight"] == (40, 32) and found.shapes["midlayer.mlp.gate_proj.weight"] == (32, 32)
    assert found.draft_parameters == sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in found.shapes.values()
    )
    per_token = 6 * found.draft_parameters * 2 + 2 * architecture.num_multiplied
    assert found.operations_per_token == per_token
    assert found.operations == 6 * 96 * per_token
    assert found.seconds(per_second=1e6, share=0.5) == pytest.approx(6 * 96 * per_token / 5e5)
    assert found.stored_per_token == (3 + 1) * 32 * 2
    assert found.memory["optimiser"] == 8 * found.draft_parameters
    assert found.memory["target weights"] == 4 * architecture.num_parameters


def test_captured_states_cost_no_target(place):
    recipe = load_recipe(place / "recipe.toml", overrides=["data.features=x"])
    found = forecast(recipe, read_architecture(recipe.target))
    assert found.operations_per_token == 6 * found.draft_parameters * 2


def test_muon_keeps_one_moment_of_a_matrix(place):
    recipe = load_recipe(place / "recipe.toml", overrides=["training.optimizer=muon"])
    found = forecast(recipe, read_architecture(recipe.target))
    matrices = {name: shape for name, shape in found.shapes.items() if len(shape) == 2 and name != "lm_head.weight"}
    inner = sum(rows * columns for rows, columns in matrices.values())
    assert found.memory["optimiser"] == 4 * (inner + 2 * (found.draft_parameters - inner))


def test_epochs_have_no_tokens_before_the_rows_are_read(place, capsys):
    arguments = ["--set", "training.steps=", "--set", "training.epochs=2"]
    assert run(["forecast", str(place / "recipe.toml"), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "tokens of the run, at most: -" in shown and "hours of each device: -" in shown


def test_a_target_that_nothing_describes_is_named(tmp_path):
    with pytest.raises(TargetError, match="nobody/nothing: its architecture is not on this machine; expected a file"):
        read_architecture(TargetSection(name="nobody/nothing"), recipes=[tmp_path / "r.toml"])


def test_a_broken_file_of_facts_is_one_line(tmp_path):
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "x.toml").write_text('names = ["me/x"]\nsource = "s"\n[config]\nmodel_type = "lama"\n')
    with pytest.raises(ConfigError, match="model_type: found 'lama'"):
        read_architecture(TargetSection(name="me/x"), recipes=[tmp_path / "r.toml"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("draft.vocab_size=65", "draft.vocab_size is 65"),
        ("draft.name=ngram", "no weights"),
        ("objective.name=x", "no 'x'"),
    ],
)
def test_a_mistake_is_one_line(place, capsys, change, complaint):
    capsys.readouterr()
    assert run(["forecast", str(place / "recipe.toml"), "--set", change]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
