"""Who made this: commit, versions, machine, command, seed and the digests of what went in, in one plain record.

It knows neither recipes nor metrics, and never writes a path of the machine: files are named by their last part and
identified by their SHA-256.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.machine import cpu_name
from paceline.store.files import sha256_file

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is needed to tell one measurement or checkpoint from another.

    files: name -> SHA-256.  notes: what the caller adds, plain values only (prompt digest, sampling, fingerprints ...).
    git_commit and git_dirty are None outside a checkout of Paceline.  Times are UTC, ISO 8601.
    """

    command: tuple[str, ...]
    started: str
    finished: str | None
    paceline: str
    git_commit: str | None
    git_dirty: bool | None
    python: str
    versions: Mapping[str, str]
    system: str
    cpu: str
    cpu_count: int
    threads: int
    device: str
    device_name: str
    dtype: str | None
    seed: int | None
    files: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON or TOML; fields that are None are left out."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return values | {"command": list(self.command)}


def open_manifest(
    *,
    device: str = "cpu",
    dtype: str | None = None,
    seed: int | None = None,
    files: Iterable[str | Path] = (),
    notes: Mapping[str, Any] | None = None,
    command: Iterable[str] | None = None,
) -> Manifest:
    """Begin a record: the clock starts, and the machine and the files are looked at once.

    device: as torch spells it.  dtype: without `torch.`.  files: read whole for their digests.
    command: arguments of the process by default; folders in it are left out.
    """
    commit, is_dirty = git_state(Path(__file__).parent)
    return Manifest(
        command=tuple(without_folders(argument) for argument in (sys.argv if command is None else command)),
        started=_now(),
        finished=None,
        paceline=__version__,
        git_commit=commit,
        git_dirty=is_dirty,
        python=platform.python_version(),
        versions=_versions(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        cpu_count=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=device,
        device_name=torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name(),
        dtype=dtype,
        seed=seed,
        files=file_digests(files),
        notes=dict(notes or {}),
    )


def close_manifest(manifest: Manifest, *, notes: Mapping[str, Any] | None = None) -> Manifest:
    """The same record with the time of its end and with more notes."""
    return replace(manifest, finished=_now(), notes={**manifest.notes, **(notes or {})})


def file_digests(files: Iterable[str | Path]) -> dict[str, str]:
    """Name -> SHA-256.  Two files of one name in different folders are told apart by a number: `a.jsonl (2)`."""
    digests: dict[str, str] = {}
    for path in map(Path, files):
        name, number = path.name, 1
        while name in digests:
            number += 1
            name = f"{path.name} ({number})"
        digests[name] = sha256_file(path)
    return digests


def without_folders(argument: str) -> str:
    """An argument with absolute and home-relative folders removed: `--out=/a/b.json` -> `--out=b.json`."""
    option, equals, value = argument.rpartition("=")
    is_path = value.startswith(("/", "~", "\\")) or value[1:3] in (":\\", ":/")
    return option + equals + (value.replace("\\", "/").rstrip("/").rpartition("/")[2] if is_path else value)


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the checkout that holds this package.

    (None, None) where there is no git, no checkout, or one that only happens to contain an installed copy.
    """
    if _git("ls-files", "--error-unmatch", "manifest.py", folder=folder) is None:
        return None, None
    commit = _git("rev-parse", "HEAD", folder=folder)
    changes = _git("status", "--porcelain", "--untracked-files=no", folder=folder)
    return commit, None if changes is None else bool(changes)


def _git(*arguments: str, folder: Path) -> str | None:
    """Output of a git command, or None where git is missing or says no."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found | {"torch": str(torch.__version__)}  # with the build, which the package's metadata lacks


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
