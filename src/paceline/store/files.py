"""Files that are either whole or absent: write aside, flush to the disk, rename; and digests to prove it.

It knows bytes and names, not what a file means.  Whatever a killed run leaves behind carries `.partial-` in its name,
is never read, and is removed by the next run.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".partial-"
_OLD = ".old"
_CHUNK = 1 << 20  # bytes read at once for a digest


@contextmanager
def file_aside(path: Path) -> Generator[Path, None, None]:
    """Give a path beside `path` to write to; rename it onto `path` once the block ends without an error.

    The bytes reach the disk before the name does.  An error removes what was written and leaves `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        yield aside
        _flush(aside)
        aside.replace(path)
        _flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(path: Path) -> Generator[Path, None, None]:
    """As `file_aside` for a whole folder.  An existing folder at `path` is replaced, last of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(path)
    aside = _aside(path)
    aside.mkdir()
    try:
        yield aside
        for inside in sorted(aside.rglob("*"), reverse=True):  # deepest first
            _flush(inside)
        _flush(aside)
        _replace_folder(aside, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes to `path`, whole or not at all."""
    with file_aside(path) as aside:
        aside.write_bytes(data)


def remove_partial(path: Path) -> None:
    """Remove what killed runs left beside `path`; what a living process is still writing stays.

    A folder that a kill caught between the two renames of its replacement is put back in its place.
    """
    for old in path.parent.glob(f".{path.name}{_OLD}{_PARTIAL}*"):
        if _is_abandoned(old) and not path.exists():
            old.rename(path)
    for pattern in (f".{path.name}{_PARTIAL}*", f".{path.name}{_OLD}{_PARTIAL}*"):
        for left in filter(_is_abandoned, path.parent.glob(pattern)):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


def sha256_file(path: Path, *, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal.  on_bytes: told how many bytes have just been read, for a progress bar."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def _aside(path: Path) -> Path:
    """The hidden name beside `path` that belongs to this process."""
    return path.with_name(f".{path.name}{_PARTIAL}{os.getpid()}")


def _flush(path: Path) -> None:
    """Ask the system to put a file's bytes, or a folder's names, on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its renames are journalled
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(aside: Path, path: Path) -> None:
    """Rename a folder onto `path`.  A folder that is not empty cannot be renamed over, so the old one steps aside."""
    if not path.exists():
        aside.rename(path)
        return
    old = path.with_name(f".{path.name}{_OLD}{_PARTIAL}{os.getpid()}")
    path.rename(old)
    aside.rename(path)
    shutil.rmtree(old)


def _is_abandoned(left: Path) -> bool:
    """Whether the process whose number ends the name is gone."""
    process = left.name.rpartition("-")[2]
    if not process.isdigit() or os.name == "nt":  # os.kill with signal 0 asks only on POSIX
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, and belongs to somebody else
        return False
    return False
