"""A manifest tells who made a thing, in plain values and without a path of the machine."""

import hashlib
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from paceline.store import manifest as manifests


@pytest.fixture
def record(tmp_path):
    (tmp_path / "a.jsonl").write_text("one")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.jsonl").write_text("two")
    return manifests.open_manifest(
        dtype="float32",
        seed=7,
        files=[tmp_path / "a.jsonl", tmp_path / "b" / "a.jsonl"],
        notes={"prompts": 40},
        command=["/usr/bin/paceline", "bench", "--out", str(tmp_path / "record.json"), f"--draft={tmp_path}/draft"],
    )


def test_holds_what_identifies_a_run(record):
    values = record.as_dict()
    assert values["seed"] == 7
    assert values["threads"] == torch.get_num_threads()
    assert values["versions"]["torch"] == torch.__version__
    assert values["device"] == "cpu"
    assert values["cpu"]
    assert "finished" not in values


def test_files_are_named_without_folders_and_told_apart(record):
    assert record.files == {
        "a.jsonl": hashlib.sha256(b"one").hexdigest(),
        "a.jsonl (2)": hashlib.sha256(b"two").hexdigest(),
    }


def test_no_path_of_the_machine(record, tmp_path):
    assert record.command == ("paceline", "bench", "--out", "record.json", "--draft=draft")
    text = json.dumps(manifests.close_manifest(record).as_dict())
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert str(Path(sys.executable).parent) not in text


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("/a/b/c.json", "c.json"),
        ("~/c.json", "c.json"),
        ("--out=/a/b/", "--out=b"),
        ("C:\\a\\c.json", "c.json"),
        ("data/a.jsonl", "data/a.jsonl"),
        ("--set", "--set"),
        ("training.steps=3", "training.steps=3"),
        ("org/model", "org/model"),
    ],
)
def test_without_folders(argument, kept):
    assert manifests.without_folders(argument) == kept


def test_closing_adds_time_and_notes(record):
    closed = manifests.close_manifest(record, notes={"rounds": 3})
    assert datetime.fromisoformat(closed.finished) >= datetime.fromisoformat(closed.started)
    assert closed.notes == {"prompts": 40, "rounds": 3}
    assert record.finished is None


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_state_of_a_checkout(tmp_path):
    assert manifests.git_state(tmp_path) == (None, None)
    git(tmp_path, "init")
    (tmp_path / "manifest.py").write_text("x = 1\n")
    assert manifests.git_state(tmp_path) == (None, None)  # a repository around an installed copy is not its history
    git(tmp_path, "add", "manifest.py")
    git(tmp_path, "commit", "-m", "first")
    commit, is_dirty = manifests.git_state(tmp_path)
    assert len(commit) == 40
    assert is_dirty is False
    (tmp_path / "manifest.py").write_text("x = 2\n")
    assert manifests.git_state(tmp_path) == (commit, True)


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifests.git_state(tmp_path) == (None, None)
