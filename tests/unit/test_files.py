"""Files are whole or absent, also when the writer dies in the middle."""

import hashlib
import os
import signal
import subprocess
import sys

import pytest

from paceline.store import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with files.file_aside(path) as aside:
        aside.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert names(path.parent) == ["a.txt"]


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with pytest.raises(RuntimeError, match="half-way"), files.file_aside(path) as aside:
        aside.write_text("new")
        raise RuntimeError("half-way")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_folder_appears_and_is_replaced(tmp_path):
    path = tmp_path / "model"
    for text in ("first", "second"):
        with files.folder_aside(path) as aside:
            (aside / "inner").mkdir()
            (aside / "inner" / "x").write_text(text)
        assert (path / "inner" / "x").read_text() == text
    assert names(tmp_path) == ["model"]


def test_an_error_leaves_the_old_folder(tmp_path):
    path = tmp_path / "model"
    with files.folder_aside(path) as aside:
        (aside / "x").write_text("old")
    with pytest.raises(RuntimeError), files.folder_aside(path) as aside:
        (aside / "x").write_text("new")
        raise RuntimeError
    assert (path / "x").read_text() == "old"
    assert names(tmp_path) == ["model"]


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.store import files
with files.folder_aside(Path(sys.argv[1])) as aside:
    (aside / "x").write_text("torn")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_nothing_to_read(tmp_path):
    path = tmp_path / "model"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(names(tmp_path)) == 1  # the torn copy, hidden
    with files.folder_aside(path) as aside:
        (aside / "x").write_text("whole")
    assert names(tmp_path) == ["model"]


def test_a_kill_between_the_renames_is_undone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    old = tmp_path / f".model.old.partial-{gone.pid}"
    old.mkdir()
    (old / "x").write_text("the last whole one")
    files.remove_partial(tmp_path / "model")
    assert (tmp_path / "model" / "x").read_text() == "the last whole one"
    assert names(tmp_path) == ["model"]


def test_what_a_living_process_writes_stays(tmp_path):
    (tmp_path / f".model.partial-{os.getppid()}").mkdir()
    files.remove_partial(tmp_path / "model")
    assert len(names(tmp_path)) == 1


def test_digest_and_its_progress(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "x").write_bytes(data)
    steps = []
    assert files.sha256_file(tmp_path / "x", on_bytes=steps.append) == hashlib.sha256(data).hexdigest()
    assert sum(steps) == len(data)
