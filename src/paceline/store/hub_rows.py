"""Rows of a data set on the Hub, streamed through the optional package `datasets`.

This module knows no format of rows: it yields what the data set holds.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from paceline.errors import ConfigError, DataError


def hub_rows(
    name: str, *, split: str, config: str | None = None, revision: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split in order.

    Raises ConfigError when `datasets` is not installed, DataError when the data set cannot be read.
    """
    with _reading(name) as datasets:
        for record in datasets.load_dataset(name, config, split=split, revision=revision, streaming=True):
            yield dict(record)


def hub_commit(name: str, *, config: str | None = None, revision: str | None = None) -> str:
    """The commit that a revision (default: the newest) stands for today.  Raises as `hub_rows`."""
    with _reading(name) as datasets:
        return str(datasets.load_dataset_builder(name, config, revision=revision).hash)  # of a Hub set, its commit


@contextmanager
def _reading(name: str) -> Generator[Any, None, None]:
    """The package; what it says of the data set `name` becomes one line."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ConfigError("Hub data sets need the package `datasets`; run: pip install datasets") from error
    try:
        yield datasets
    except (OSError, ValueError, RuntimeError) as error:  # its own errors and those of the network derive from these
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot read hub:{name}: {reason}; check name, split and network") from error
