"""The compiled library: which compiler, which name, whole or absent, and a reason in words where there is none."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from paceline.native import build
from paceline.native.build import Unavailable, build_library, find_compiler
from paceline.native.library import Library

FAKE = """#!{python}
import pathlib, sys
log = pathlib.Path({log!r})
if "--version" in sys.argv:
    print("fake 1.0")
    sys.exit(0)
log.write_text(log.read_text() + " ".join(sys.argv[1:]) + chr(10) if log.exists() else " ".join(sys.argv[1:]) + chr(10))
if {refuse!r} and any(word in sys.argv for word in {refuse!r}.split()):
    print("note: in a file", file=sys.stderr)
    print("error: unknown argument", file=sys.stderr)
    sys.exit(1)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(b"not a library")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, and a PATH with nothing on it but what a test puts there."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "bin").mkdir()
    return tmp_path / "cache" / "native"


def compiler(tmp_path: Path, name: str, *, refuse: str = "") -> None:
    """Put a compiler on PATH that writes down what it is asked."""
    log = tmp_path / f"{name}.log"
    program = tmp_path / "bin" / name
    program.write_text(FAKE.format(python=sys.executable, log=str(log), refuse=refuse))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def calls(tmp_path: Path, name: str) -> list[str]:
    log = tmp_path / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


def test_order_of_compilers(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"no C\+\+ compiler"):
        find_compiler()
    monkeypatch.setattr(build, "find_spec", lambda name: name == "ziglang")
    assert find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    compiler(tmp_path, "clang++")
    assert find_compiler() == ["clang++"]
    compiler(tmp_path, "g++")
    assert find_compiler() == ["g++"]
    compiler(tmp_path, "mine")
    monkeypatch.setenv("CXX", "mine -O1")
    assert find_compiler() == ["mine", "-O1"]
    monkeypatch.setenv("CXX", "missing")
    with pytest.raises(Unavailable, match="missing"):
        find_compiler()


def test_compiled_once(tmp_path: Path, folder: Path) -> None:
    compiler(tmp_path, "g++")
    path = build_library()
    assert path.parent == folder and build_library() == path
    assert len(calls(tmp_path, "g++")) == 1
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_the_name_depends_on_all_that_went_in(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, "g++")
    names = {build_library().name, build_library(tuning=[("-DX",)]).name}
    for part in ("cpu_name", "cpu_features"):
        monkeypatch.setattr(build, part, lambda: "another")
        names.add(build_library().name)
    monkeypatch.setattr(build, "FLAGS", ("-O2",))
    names.add(build_library().name)
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in build.SOURCES:
        (sources / name).write_text("// changed")
    monkeypatch.setattr(build, "source_folder", lambda: sources)
    names.add(build_library().name)
    assert len(names) == 6


def test_flags_that_the_compiler_does_not_know_are_left_out(tmp_path: Path, folder: Path) -> None:
    compiler(tmp_path, "g++", refuse="-march=native -mcpu=native")
    build_library()
    assert len(calls(tmp_path, "g++")) == 3


def test_a_failure_leaves_nothing_and_says_why(tmp_path: Path, folder: Path) -> None:
    compiler(tmp_path, "g++", refuse="-O3")
    with pytest.raises(Unavailable, match=r"g\+\+ cannot compile it: error: unknown argument"):
        build_library()
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, folder: Path) -> None:
    compiler(tmp_path, "g++")
    folder.parent.write_text("a file stands where the folder should be")
    with pytest.raises(Unavailable, match="cannot compile it"):
        build_library()


def test_a_broken_library_is_named(tmp_path: Path, folder: Path) -> None:
    compiler(tmp_path, "g++")
    path = build_library()
    with pytest.raises(Unavailable, match=path.name):
        Library(path)
