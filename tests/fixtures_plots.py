"""A stand-in for matplotlib, which is an optional package: it draws nothing and remembers what it was told."""

import sys
from types import ModuleType
from unittest.mock import MagicMock

from paceline.measure import plots


def stand_in(monkeypatch) -> MagicMock:
    """Install it, with figures that save their own name; returns the axes that every figure shares."""
    figure, module = MagicMock(), ModuleType("matplotlib.figure")
    figure.savefig = lambda path, **options: path.write_text(options["format"])
    figure.subplots.return_value.bar.return_value = [MagicMock() for _ in range(3)]
    module.Figure = lambda **options: figure
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    monkeypatch.setattr(plots, "find_spec", lambda name: object())
    return figure.subplots.return_value
