"""The package as data: its files, its syntax trees and who imports whom.  Knows no rule; the tests of the house do."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
PLUGIN_FOLDERS = ("drafts", "training.objectives", "interop", "cli")


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name below `paceline` ("" for the root), its text and its syntax tree."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """First part of the name: the room of the house that the file stands in."""
        return self.name.partition(".")[0]


def parse(name: str, text: str, *, path: str = "planted.py") -> Module:
    """A module from text, for files and for planted faults alike."""
    return Module(name, path, text, ast.parse(text))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(parse(name, file.read_text("utf-8"), path=str(file.relative_to(ROOT))))
    return tuple(found)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, at the top and inside functions alike; relative ones are made absolute."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                inside = module.name.split(".") if module.path.endswith("__init__.py") else module.name.split(".")[:-1]
                kept = inside[: len(inside) - (node.level - 1)]
                base = ".".join(part for part in ("paceline", *kept, base) if part)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def own_imports(module: Module, *, names: frozenset[str] | None = None) -> Iterator[tuple[int, str]]:
    """(line, module name below `paceline`) for every import of our own; a plug-in folder that is loaded counts."""
    known = module_names() if names is None else names
    for line, target in imports(module):
        if target.split(".")[0] == "paceline":
            inside = target.removeprefix("paceline").removeprefix(".")
            while inside and inside not in known:  # `from paceline.ops.tree import depths`: the last part is no module
                inside = inside.rpartition(".")[0]
            yield line, inside
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and call_name(node) in ("load_plugin", "plugin_names") and node.args:
            folder = node.args[0]
            if isinstance(folder, ast.Constant) and isinstance(folder.value, str):
                yield node.lineno, folder.value


def call_name(node: ast.Call) -> str:
    """Last part of what is called: `load` in `torch.load(...)`."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def dotted_call(node: ast.Call) -> str:
    """The whole of what is called where it is a chain of names: `torch.load`; else ""."""
    parts = []
    place = node.func
    while isinstance(place, ast.Attribute):
        parts.append(place.attr)
        place = place.value
    return ".".join([place.id, *reversed(parts)]) if isinstance(place, ast.Name) else ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def repository_files() -> tuple[Path, ...]:
    """Text files that are or would be committed; without git (an unpacked archive), every file of the tree."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        files = [file for file in ROOT.rglob("*") if not any(part.startswith(".venv") for part in file.parts)]
    return tuple(file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:4096])
