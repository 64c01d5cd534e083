"""The cost of a call by size: both engines, every size, limits that make sense, a record of plain values."""

from __future__ import annotations

import json

import pytest

from fixtures_models import tiny_llama
from paceline.cli.__main__ import run
from paceline.measure import verify_cost
from paceline.measure.verify_cost import Machine, cost_record, measure_costs, measure_machine
from paceline.targets.generic import Target


def test_every_engine_and_size_is_measured() -> None:
    model = tiny_llama()
    machine = Machine(read_gb_per_s=10.0, gflop_per_s=100.0)
    targets = Target(model, compile="off"), Target(model, compile="off")
    costs = measure_costs(*targets, machine=machine, nodes=[1, 4, 80], context=7, rounds=3)
    assert [(cost.engine, cost.nodes, cost.calls) for cost in costs] == [("eager", n, 3) for n in (1, 4, 80)]
    assert all(0 < cost.lowest <= cost.median and cost.times_limit > 1 for cost in costs)
    assert costs[0].times_one == 1.0
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "proj" in name or "head" in name)
    assert costs[0].limit == pytest.approx(4e-9 * weights / 10.0)
    assert costs[2].limit == pytest.approx(2e-9 * weights * 80 / 100.0)
    record = cost_record(costs, machine=machine, manifest={})
    assert json.loads(json.dumps(record)) == record and record["kind"] == "verify-cost"


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_cost, "READ_FLOATS", 1 << 16)
    monkeypatch.setattr(verify_cost, "PRODUCT", (16, 64, 64))
    machine = measure_machine()
    assert machine.read_gb_per_s > 0 and machine.gflop_per_s > 0


def test_sizes_that_are_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify-cost", "--target", "smollm2", "--out", "x.json", "--nodes", "1,zwei"]) == 2
    assert "--nodes" in capsys.readouterr().err
