"""Plug-ins are found by file name, loaded on demand, and a typing mistake is answered with the near miss."""

import sys

import pytest

from paceline import plugins
from paceline.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A plug-in folder `paceline.tested` with two plug-ins, one of them without its export, and a private file."""
    import paceline

    room = tmp_path / "tested"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "wave.py").write_text("PLUGIN = 'the wave'\n")
    (room / "blank.py").write_text("")
    (room / "_base.py").write_text("raise RuntimeError('not a plug-in')\n")
    monkeypatch.setattr(paceline, "__path__", [*paceline.__path__, str(tmp_path)])
    yield "tested"
    for name in [name for name in sys.modules if name.startswith("paceline.tested")]:
        del sys.modules[name]


def test_lists_files_without_importing_them(folder):
    assert plugins.plugin_names(folder) == ("blank", "wave")
    assert "paceline.tested.wave" not in sys.modules


def test_loads_by_file_name(folder):
    assert plugins.load_plugin(folder, name="wave") == "the wave"


@pytest.mark.parametrize("name", ["wav", "waves", "_base", ""])
def test_unknown_name_lists_what_there_is(folder, name):
    with pytest.raises(ConfigError, match="known: blank, wave"):
        plugins.load_plugin(folder, name=name)


def test_near_miss_is_suggested(folder):
    with pytest.raises(ConfigError, match="did you mean 'wave'"):
        plugins.load_plugin(folder, name="wawe")


def test_file_without_export(folder):
    with pytest.raises(ConfigError, match="exports no PLUGIN"):
        plugins.load_plugin(folder, name="blank")


def test_dotted_name_from_outside(folder, tmp_path, monkeypatch):
    lab = tmp_path / "my_lab"
    lab.mkdir()
    (lab / "wave.py").write_text("PLUGIN = 'from outside'\n")
    (lab / "needy.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugins.load_plugin(folder, name="my_lab.wave") == "from outside"
    with pytest.raises(ConfigError, match=r"cannot import 'my_lab\.wavy'"):
        plugins.load_plugin(folder, name="my_lab.wavy")
    with pytest.raises(ConfigError, match=r"cannot import 'your_lab\.wave' \(no module 'your_lab'\)"):
        plugins.load_plugin(folder, name="your_lab.wave")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        plugins.load_plugin(folder, name="my_lab.needy")


def test_suggestion_without_near_miss():
    assert plugins.suggestion("zzz", known=["a", "b"]) == "known: a, b"
    assert plugins.suggestion("zzz", known=[]) == "known: none"


@pytest.mark.parametrize("name", [".", "..", ".x", "a..b", "a.", "a b.c"])
def test_a_name_that_is_no_module_name(folder, name):
    with pytest.raises(ConfigError, match="expected a plug-in's name or a dotted module name"):
        plugins.load_plugin(folder, name=name)


def test_a_plugin_of_another_kind(folder):
    with pytest.raises(ConfigError, match="exports a str as PLUGIN; expected a int"):
        plugins.load_plugin(folder, name="wave", kind=int)


def test_a_file_names_only_what_is_imported_already(folder):
    assert plugins.known_plugin(folder, name="wave", kind=str) == "the wave"
    assert plugins.known_plugin(folder, name="paceline.tested.wave", kind=str) == "the wave"
    with pytest.raises(ConfigError, match="a file never chooses what is imported"):
        plugins.known_plugin(folder, name="paceline.tested.blank", kind=str)
