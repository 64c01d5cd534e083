"""`paceline study` on a tiny grid: one command from file to tables, and the same results after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from fixtures_study import in_this_process, write_study
from paceline.cli import _study_run
from paceline.cli.__main__ import MISTAKE, run
from paceline.errors import ConfigError
from paceline.measure.paired import Sample, gain_figures
from paceline.measure.record import read_records
from paceline.measure.report import results_block
from paceline.store.files import Claim
from paceline.training.budget import equal_steps, step_seconds
from paceline.training.log import read_log

CELLS = {f"{arm}-seed{seed}" for arm in ("ttt", "short") for seed in (0, 1)}
# A study whose own process dies (SIGKILL) when its second cell's seventh step is told; that cell trains in a child of
# its own, the first one here, since a new interpreter is what costs time.
KILLED = """
import os, sys
sys.path[:0] = {paths!r}
from fixtures_study import in_this_process
from paceline.cli import __main__, _study_run
real = _study_run.run_child
def killing(work, arguments, *, log, hear):
    if "short-seed0" not in str(log):
        return in_this_process(work, arguments, log=log, hear=hear)
    def heard(done, total, figures):
        if done == 7:
            os.kill(os.getpid(), 9)
    real(work, arguments, log=log, hear=heard)
_study_run.run_child = killing
sys.exit(__main__.run({arguments!r}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A study's file, and the folder in which it has been run without a stop, records beside it."""
    root = tmp_path_factory.mktemp("study")
    file = write_study(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_study_run, "run_child", in_this_process)
        arguments = ["--out", root / "whole", "--record", root / "records/x-study.json"]
        assert run(["study", *map(str, [file, *arguments, "--pair", root / "records/x-pair.json"])]) == 0
    return root


@pytest.fixture(autouse=True)
def _no_new_processes(monkeypatch):
    monkeypatch.setattr(_study_run, "run_child", in_this_process)


def weights(folder):
    return {path.parts[-4]: load_file(path) for path in folder.glob("cells/*/run/last/draft.safetensors")}


def lengths(folder):
    record = json.loads((folder / "study.json").read_text())
    kept = ("arm", "plan", "temperature", "accepted_length", "length_gain_pct", "length_gain_pct_se", "identical")
    return [{key: each.get(key) for key in kept} for each in record["measured"]]


def test_a_killed_study_goes_on_and_ends_as_one_that_was_not(place):
    out = place / "killed"
    arguments = ["study", str(place / "study.toml"), "--out", str(out)]
    code = KILLED.format(paths=sys.path, arguments=arguments)
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    cell = out / "cells" / "short-seed0"
    assert json.loads((cell / "cell.json").read_text())["spent"] is None
    assert json.loads((out / "cells" / "ttt-seed0" / "cell.json").read_text())["spent"]["steps"] == 12
    assert any((cell / "run" / "state").glob("step-*"))
    assert not list(out.glob("bench/*.json"))
    kept = (out / "cells" / "ttt-seed0" / "run" / "last" / "draft.safetensors").stat().st_mtime_ns
    wait_until_free(cell / "run")
    assert run(arguments) == 0
    assert (out / "cells" / "ttt-seed0" / "run" / "last" / "draft.safetensors").stat().st_mtime_ns == kept
    assert lengths(out) == lengths(place / "whole")
    ours, theirs = weights(out), weights(place / "whole")
    assert set(ours) == set(theirs) == CELLS
    for name, tensors in theirs.items():
        assert all(tensor.equal(ours[name][key]) for key, tensor in tensors.items()), name
    assert not theirs["ttt-seed0"]["fc.weight"].equal(theirs["short-seed0"]["fc.weight"])


def wait_until_free(folder):
    """The killed study's child ends with it."""
    for _ in range(600):
        try:
            Claim(folder).release()
            return
        except ConfigError:
            time.sleep(0.1)
    pytest.fail("the child outlives the study that was killed")


def test_a_record_has_costs_figures_and_paired_gains(place):
    record = json.loads((place / "records" / "x-study.json").read_text())
    assert record["kind"] == "study" and record["seeds"] == [0, 1] and record["baseline"] == "ttt"
    costs = record["arms"]
    assert costs["ttt"]["tokens"] == costs["short"]["tokens"] > 0
    assert costs["ttt"]["steps"] == 12 and costs["ttt"]["seconds"] > 0 and costs["ttt"]["num_seeds"] == 2
    assert costs["ttt"]["accepted_length"] >= 1
    assert len(record["measured"]) == 2 * 2 * 2
    for each in record["measured"]:
        assert each["num_prompts"] == 5 and each["accepted_length"] >= 1 and each["s_wall"] > 0
        assert ("length_gain_pct" in each) == (each["arm"] == "short")
        assert each["identical"] == (True if each["temperature"] == 0 else None)
        assert {name: file["n"] for name, file in each["per_file"].items()} == {"a.jsonl": 6, "b.jsonl": 4}
    shown = (place / "whole" / "study.md").read_text()
    assert "| ttt (baseline) |" in shown and "temperature 1" in shown and "short: a.jsonl" in shown


def test_a_pair_is_the_same_figures_with_both_bench_records(place):
    pair = json.loads((place / "records" / "x-pair.json").read_text())
    study = json.loads((place / "records" / "x-study.json").read_text())
    same = next(each for each in study["measured"] if (each["arm"], each["plan"]) == ("short", "tree:2x2:3"))
    for name in ("length_gain_pct", "length_gain_pct_se", "s_wall_gain_pct", "s_wall_gain_pct_se"):
        assert pair[name] == same[name]
    assert pair["length_gain_se"] == pair["length_gain_pct_se"] and pair["s_wall_gain_se"] == pair["s_wall_gain_pct_se"]
    for name in ("baseline", "short"):
        assert pair[name]["kind"] == "bench" and pair[name]["n"] == 10 and pair[name]["conversations"] == 5
        assert pair[name]["identical"] is True and pair[name]["plan"] == "tree:2x2:3"
    gain = 100 * (pair["short"]["accepted_length"] / pair["baseline"]["accepted_length"] - 1)
    assert pair["length_gain_pct"] == pytest.approx(gain, abs=1e-2)
    assert set(pair["per_file"]) == {"a.jsonl", "b.jsonl"} and "length_gain_se" in pair["per_file"]["a.jsonl"]


def test_records_become_blocks_of_documents(place):
    text = results_block(read_records(place / "records"))
    assert "### x-pair" in text and "### x-study" in text and "gain of L, %" in text


def test_all_arms_of_a_seed_are_decoded_in_one_run(place):
    runs = sorted((place / "whole" / "bench").glob("*.json"))
    assert len(runs) == 4  # seeds x temperatures
    found = json.loads(runs[0].read_text())
    systems = {"plain", "ttt chain:2", "ttt tree:2x2:3", "short chain:2", "short tree:2x2:3"}
    assert all(set(each["results"]) == systems for each in found["observations"])
    assert len(found["observations"]) == 5
    assert found["conditions"]["draft"]["ttt"]["fingerprint"] != found["conditions"]["draft"]["short"]["fingerprint"]


def test_a_finished_study_does_nothing_again_and_a_changed_cell_is_refused(place, monkeypatch, capsys):
    def never(*_arguments, **_options):
        raise AssertionError("it was done already")

    monkeypatch.setattr(_study_run, "run_child", never)
    arguments = ["study", str(place / "study.toml"), "--out", str(place / "whole")]
    before = json.loads((place / "whole" / "study.json").read_text())["measured"]
    assert run(arguments) == 0
    assert json.loads((place / "whole" / "study.json").read_text())["measured"] == before
    capsys.readouterr()
    changed = 'study.set=["training.steps=12", "training.learning_rate=0.5"]'
    assert run([*arguments, "--set", changed]) == MISTAKE
    error = capsys.readouterr().err
    assert "ttt-seed0 was trained with training.learning_rate = 0.01, now 0.5; choose another --out" in error
    assert error.count("\n") == 1


def test_an_arm_with_equal_seconds_takes_the_steps_that_its_trial_says(place, capsys):
    text = (place / "study.toml").read_text().replace('name = "short"', 'name = "slow"\nequal = "seconds"')
    text = text.replace("{ steps = 1 }", "{ steps = 4 }").replace("seeds = [0, 1]", "seeds = [0]")
    text = text.replace("[0.0, 1.0]", "[0.0]").partition("[pair]")[0] + "[budget]\ntrial_steps = 3\n"
    (place / "seconds.toml").write_text(text)
    out = place / "seconds"
    assert run(["study", str(place / "seconds.toml"), "--out", str(out)]) == 0
    own, one = (step_seconds(read_log(out / "trials" / arm / "run" / "log.jsonl")) for arm in ("slow", "ttt"))
    record = json.loads((out / "study.json").read_text())
    assert record["arms"]["slow"]["steps"] == equal_steps(12, baseline=one, own=own)
    assert record["arms"]["slow"]["equal"] == "seconds" and record["arms"]["slow"]["seconds"] > 0
    assert "slow-seed0: a step takes" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_writes_nothing_and_tells_steps_and_answers(place, capsys):
    assert run(["study", str(place / "study.toml"), "--out", str(place / "dry"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4 cells" in shown and "ttt-seed1" in shown and "1152" in shown  # 12 steps of 96 tokens
    assert "4 interleaved runs" in shown and "5 decoders" in shown
    assert not (place / "dry").exists()


def test_a_pair_of_other_requests_is_no_difference(place):
    found = _study_run.read_run(next((place / "whole" / "bench").glob("*.json")), seed=0, temperature=0.0)
    name = "ttt chain:2"
    samples = [
        Sample(each.conversation, each.turn, 0, each.file, each.results["plain"], each.results[name])
        for each in found.observations
    ]
    assert gain_figures(samples, samples)["length_gain_pct"].value == 0
    with pytest.raises(Exception, match="other prompts or seeds"):
        gain_figures(samples, samples[1:])
