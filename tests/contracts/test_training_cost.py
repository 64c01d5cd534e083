"""What a training step costs: every part is there, products are counted as they were carried out, the table adds up."""

import json

import pytest

from fixtures_training import random_target, recipe_of, write_rows
from paceline.measure.report import training_cost_tables
from paceline.training.cost import measure_training, training_record
from paceline.training.prepare import prepare


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_by_its_parts(tmp_path, optimizer):
    recipe = recipe_of(write_rows(tmp_path / "rows.jsonl", count=24), f"training.optimizer={optimizer}")
    said: list[int] = []
    job = prepare(recipe, target=random_target(), say=lambda line: None)
    cost = measure_training(job, steps=3, watch=said.append)
    assert said == [1, 2, 3, 4, 5]
    assert list(cost.seconds) == list(cost.gflop) == ["states", "forward", "backward", "optimiser"]
    assert all(spent > 0 for spent in cost.seconds.values())
    assert 0 < cost.supervised < cost.tokens <= 96
    assert cost.gflop["states"] > 0  # the target ran
    assert cost.gflop["forward"] < cost.gflop["backward"]  # two products for each, but for what has no gradient
    assert (cost.gflop["optimiser"] > 0) == (optimizer == "muon")
    assert 0 < cost.share_of_peak < 1
    assert cost.memory > 100e6
    manifest = {"notes": {"target": "tiny"}, "threads": 1, "dtype": "fp32"}
    record = training_record(cost, manifest=manifest)
    assert json.loads(json.dumps(record)) == record
    (table,) = training_cost_tables(record)
    whole = sum(float(row[1]) for row in table.rows[:-1])
    assert table.rows[-1][0] == "whole step" and float(table.rows[-1][1]) == pytest.approx(whole, abs=3)
