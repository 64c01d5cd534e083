"""A plug-in is a file: in a plug-in folder the file name is the key and `PLUGIN` is the one export.

Plug-ins are imported by name on demand, so there is no table to edit and no import-order magic; this module refuses to
know what a plug-in does. Names with a leading underscore are not plug-ins, and a dotted name such as `my_lab.wave` is
imported from outside the package.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, TypeVar

from paceline.errors import ConfigError

Kind = TypeVar("Kind")


def plugin_names(folder: str) -> tuple[str, ...]:
    """Keys of a plug-in folder in alphabetical order, without importing any plug-in.

    folder: dotted path below `paceline`, for example `drafts` or `training.objectives`.
    """
    spec = find_spec(f"paceline.{folder}")
    locations = spec.submodule_search_locations if spec is not None else None
    assert locations is not None, f"paceline.{folder} is not a folder"
    found = iter_modules(locations)
    return tuple(sorted(module.name for module in found if not module.name.startswith("_")))


def load_plugin(folder: str, *, name: str, kind: type[Any] = object) -> Any:
    """The `PLUGIN` of one file.

    folder: as in `plugin_names`.  name: a file name without `.py`, or a dotted module path from outside the package;
    that runs code, so it must be the user's own word, never that of a file (`known_plugin`).  kind: what it must be.
    Raises ConfigError, naming near misses, if there is no such plug-in or the module exports no `PLUGIN`.
    """
    if "." in name:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"{folder}: found '{name}', expected a plug-in's name or a dotted module name")
        return _export(_import_outside(name, folder=folder), kind=kind)
    known = plugin_names(folder)
    if name not in known:
        raise ConfigError(
            f"{folder}: no '{name}'; {suggestion(name, known=known)} (or a dotted module name of your own)"
        )
    return _export(import_module(f"paceline.{folder}.{name}"), kind=kind)


def known_plugin(folder: str, *, name: str, kind: type[Kind]) -> Kind:
    """The `PLUGIN` that a file names: one of ours, or of a module that the program has imported already.

    folder: as in `plugin_names`.  kind: what it must be.  Nothing is imported from outside the package.
    Raises ConfigError for any other name.
    """
    if "." not in name:
        return load_plugin(folder, name=name, kind=kind)
    module = sys.modules.get(name)
    if module is None:
        raise ConfigError(
            f"found '{name}', expected one of {', '.join(plugin_names(folder))}: a file never chooses what is "
            f"imported; where you trust it, import {name} in Python first"
        )
    return _export(module, kind=kind)


def suggestion(name: str, *, known: tuple[str, ...] | list[str]) -> str:
    """Half a sentence for an error message: the nearest known name if one is near, and the list of all."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    listing = ", ".join(known) if known else "none"
    return f"did you mean '{near[0]}'? known: {listing}" if near else f"known: {listing}"


def _import_outside(name: str, *, folder: str) -> Any:
    """Import a dotted name; only the absence of that very module is turned into our error."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the plug-in was found; something that it imports itself is missing
        raise ConfigError(
            f"{folder}: cannot import '{name}' (no module '{error.name}'); "
            "put its folder on PYTHONPATH or install its package"
        ) from error


def _export(module: Any, *, kind: type[Any]) -> Any:
    exports = vars(module)
    if "PLUGIN" not in exports:
        raise ConfigError(f"{module.__name__} exports no PLUGIN; a plug-in file ends with `PLUGIN = ...`")
    if not isinstance(exports["PLUGIN"], kind):
        found = type(exports["PLUGIN"]).__name__
        raise ConfigError(f"{module.__name__} exports a {found} as PLUGIN; expected a {kind.__name__}")
    return exports["PLUGIN"]
