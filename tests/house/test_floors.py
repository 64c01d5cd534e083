"""Imports run one way, and no module is reached from itself."""

import pytest

from house.source import PLUGIN_FOLDERS, Module, modules, own_imports, parse

# From the ground up.  A room imports only from floors listed before its own; rooms on one floor do not know each other.
FLOORS = (
    {"records", "errors", "shipped"},
    {"ops"},
    {"plugins", "toml", "cache", "machine"},
    {"config", "native"},
    {"targets", "drafts"},
    {"decoding", "store"},
    {"data"},
    {"training", "measure", "interop"},
    {"cli"},
)
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor}
LEVEL[""] = 0  # the root: a version and a table of names, imports nothing of ours


def climbing(module: Module, *, names: frozenset[str] | None = None) -> list[str]:
    """Imports of a room that is not on a lower floor."""
    faults = []
    for line, target in own_imports(module, names=names):
        room = target.partition(".")[0]
        if room != module.room and LEVEL[room] >= LEVEL[module.room] and not (room == "" and module.room):
            faults.append(f"{module.path}:{line}: {module.room} (floor {LEVEL[module.room]}) imports {target}")
    return faults


def neighbours(module: Module, *, names: frozenset[str] | None = None) -> list[str]:
    """Plug-ins that import a plug-in of their own folder: only its underscore files are shared."""
    folder, _, own = module.name.rpartition(".")
    if folder not in PLUGIN_FOLDERS or own.startswith("_"):
        return []
    faults = []
    for line, target in own_imports(module, names=names):
        other_folder, _, other = target.rpartition(".")
        if other_folder == folder and other != own and not other.startswith("_"):
            faults.append(f"{module.path}:{line}: plug-in {module.name} imports plug-in {target}")
    return faults


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that can reach themselves.  A package's own `__init__` is reached by everything in it and is left out."""
    faults = []
    for start in graph:
        seen: set[str] = set()
        front = set(graph[start])
        while front:
            seen |= front
            front = {after for name in front for after in graph.get(name, ())} - seen
        if start in seen:
            faults.append(start)
    return faults


def test_every_room_stands_on_a_floor():
    assert {module.room for module in modules()} <= set(LEVEL)


def test_imports_run_one_way():
    assert not [fault for module in modules() for fault in climbing(module)]


def test_plugins_do_not_import_their_neighbours():
    assert not [fault for module in modules() for fault in neighbours(module)]


def test_no_cycles():
    graph = {module.name: {target for _, target in own_imports(module)} - {module.name} for module in modules()}
    assert not cycles(graph)


NAMES = frozenset({"", "ops", "ops.tree", "decoding", "decoding.loop", "store", "store.hub", "drafts", "drafts.ngram"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ops.tree", "from paceline.decoding.loop import run"),
        ("ops.tree", "from paceline import decoding"),
        ("ops.tree", "def f():\n    import paceline.decoding.loop"),
        ("ops.tree", "from ..decoding import loop"),
        ("decoding.loop", "from paceline.store.hub import load_target"),
        ("ops.tree", "from paceline.plugins import load_plugin\nload_plugin('drafts', name='x')"),
        ("config", "plugins.plugin_names('drafts')"),
        ("", "from paceline import ops"),
    ],
)
def test_a_climbing_import_is_caught(name, text):
    path = "src/paceline/__init__.py" if name == "" else "planted.py"
    names = NAMES | {"plugins", "config"}
    assert climbing(parse(name, text, path=path), names=names)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("decoding.loop", "from paceline.ops.tree import depths\nfrom paceline.ops import tree"),
        ("decoding.loop", "from paceline import __version__"),
        ("decoding.loop", "import torch\nfrom .plain import generate"),
        ("cli.bench", "from paceline.plugins import load_plugin\nload_plugin('drafts', name='x')"),
    ],
)
def test_a_descending_import_is_fine(name, text):
    assert not climbing(parse(name, text), names=NAMES | {"plugins"})


def test_a_neighbour_is_caught():
    names = frozenset({"", "drafts", "drafts.eagle3", "drafts._layers", "drafts.griffin"})
    assert neighbours(parse("drafts.griffin", "from paceline.drafts.eagle3 import Eagle3"), names=names)
    assert not neighbours(parse("drafts.griffin", "from paceline.drafts._layers import Block"), names=names)


def test_a_cycle_is_caught():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
