"""A data set on the Hub without the Hub: stands in for the package `datasets`, and nothing of ours."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


def fake_datasets(monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], *, commit: str = "c0ffee") -> dict:
    """Let `datasets` hold one set, `records`, at `commit`.  Returns what it was last asked for."""
    asked: dict[str, Any] = {}

    def load_dataset(name: str, config: str | None, **options: Any):
        asked.update(options, name=name, config=config)
        return iter(records)

    def load_dataset_builder(name: str, config: str | None, *, revision: str | None):
        return SimpleNamespace(hash=revision or commit)

    package = SimpleNamespace(load_dataset=load_dataset, load_dataset_builder=load_dataset_builder)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked
