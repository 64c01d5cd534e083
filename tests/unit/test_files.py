"""Files are whole or absent, also when the writer dies in the middle; nobody writes where another process does."""

import errno
import hashlib
import os
import signal
import subprocess
import sys

import pytest

from paceline.errors import ConfigError
from paceline.store import files
from paceline.store.faults import fault_line


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
from paceline.errors import ConfigError
from paceline.store import files
from paceline.store.faults import fault_line
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


CLAIMING = """
import sys, time
from pathlib import Path
from paceline.store.files import Claim
claim = Claim(Path(sys.argv[1]))
print("mine", flush=True)
time.sleep(600)
"""


def test_two_processes_are_not_both_let_write_to_a_folder_and_kill_9_frees_it(tmp_path):
    folder = tmp_path / "out"
    other = subprocess.Popen([sys.executable, "-c", CLAIMING, str(folder)], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"mine\n"
    with pytest.raises(ConfigError, match=r"another process writes to .*out; wait for it, or choose another --out"):
        files.Claim(folder)
    other.kill()
    other.wait()
    with files.Claim(folder):
        assert names(folder) == [], "a lock leaves no file behind"
    with files.Claim(folder):
        assert True, "the end of a block frees it"


def test_a_system_without_locks_grants_every_claim(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with files.Claim(tmp_path), files.Claim(tmp_path):
        assert names(tmp_path) == []


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_flush", full)
    with pytest.raises(OSError) as caught:
        files.write_text(tmp_path / "a.txt", "text")
    assert fault_line(caught.value) == f"{tmp_path / 'a.txt'}: No space left on device; free space and run again"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "choose another --out"),
        (errno.EACCES, "choose another --out"),
        (errno.ENOTDIR, "a part of it is a file, expected folders"),
        (errno.EEXIST, "it is a file, expected a folder"),
        (errno.EISDIR, "it is a folder, expected a file"),
        (errno.EIO, "check the path and the disk"),
    ],
)
def test_advice_fits_the_fault(number, advice):
    line = fault_line(OSError(number, os.strerror(number), "out"))
    assert line.startswith(f"out: {os.strerror(number)}; ")
    assert advice in line and "space" not in line
