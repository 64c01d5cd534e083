"""In a plug-in folder every file exports one `PLUGIN`, found without importing its neighbours."""

import ast

import pytest

from house.source import PLUGIN_FOLDERS, Module, modules, parse
from paceline.plugins import plugin_names


def exports(module: Module) -> int:
    """How often a module assigns PLUGIN at its top level."""
    count = 0
    for node in module.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        count += sum(isinstance(target, ast.Name) and target.id == "PLUGIN" for target in targets)
    return count


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_every_plugin_file_exports_one_plugin(folder):
    by_name = {module.name: module for module in modules()}
    assert not [name for name in plugin_names(folder) if exports(by_name[f"{folder}.{name}"]) != 1]


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_private_files_export_none(folder):
    private = [module for module in modules() if module.name.startswith(f"{folder}._")]
    assert not [module.name for module in private if exports(module)]


def test_a_missing_export_is_caught():
    assert exports(parse("drafts.x", "PLUGIN = Draft")) == 1
    assert exports(parse("drafts.x", "PLUGIN: type = Draft")) == 1
    assert exports(parse("drafts.x", "def f():\n    PLUGIN = Draft")) == 0
