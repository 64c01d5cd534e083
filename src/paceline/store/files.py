"""Files that are either whole or absent: write aside, flush to the disk, rename; and digests to prove it.

It knows bytes and names, not what a file means.  Whatever a killed run leaves behind carries `.partial-` in its name,
is never read, and is removed by the next run.
"""

import errno
import glob
import hashlib
import os
import shutil
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import ConfigError

_PARTIAL = ".partial-"
_OLD = ".old"
_CHUNK = 1 << 20  # bytes read at once for a digest


class Claim:
    """The right to write below a folder, or to one file, that no two processes have at once.

    is_folder: make the folder where there is none; a file must exist.  The right ends with `release`, with the block of
    a `with`, and with the process, however that dies.  Systems and disks that have no locks grant it to everybody.
    Raises ConfigError when somebody else has it, and OSError.
    """

    def __init__(self, path: Path, *, is_folder: bool = True) -> None:
        if is_folder:
            path.mkdir(parents=True, exist_ok=True)
        self._end: Callable[[], object] = lambda: None
        if os.name == "nt":
            return  # Windows opens no folders, and has no flock
        descriptor = os.open(path, os.O_RDONLY)
        self._end = weakref.finalize(self, os.close, descriptor)
        if not _lock(descriptor):
            self.release()
            raise ConfigError(f"another process writes to {path}; wait for it, or choose another --out")

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def file_aside(path: Path) -> Generator[Path, None, None]:
    """Give a path beside `path` to write to; rename it onto `path` once the block ends without an error.

    The bytes reach the disk before the name does.  An error removes what was written and leaves `path` as it was.
    Raises ConfigError for what is not a file, which the rename would destroy.
    """
    if is_special(path):
        raise ConfigError(f"{path} is a device or a pipe, expected a file; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        yield aside
        _flush(aside)
        aside.replace(path)
        _flush(path.parent)
    except OSError as error:
        _name_plainly(error, aside=aside, path=path)
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(path: Path) -> Generator[Path, None, None]:
    """As `file_aside` for a whole folder.  An existing folder at `path` is replaced, last of all; a file is not."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(path)
    aside = _aside(path)
    try:
        aside.mkdir()
        yield aside
        for inside in sorted(aside.rglob("*"), reverse=True):  # deepest first
            _flush(inside)
        _flush(aside)
        _replace_folder(aside, path)
        _flush(path.parent)
    except OSError as error:
        _name_plainly(error, aside=aside, path=path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_special(path: Path) -> bool:
    """Whether a device, a pipe or a socket stands there: nothing that a file may replace."""
    return path.exists() and not (path.is_file() or path.is_dir())


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
    name = glob.escape(path.name)
    for old in path.parent.glob(f".{name}{_OLD}{_PARTIAL}*"):
        if _is_abandoned(old) and not path.exists():
            old.rename(path)
    for pattern in (f".{name}{_PARTIAL}*", f".{name}{_OLD}{_PARTIAL}*"):
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


def _lock(descriptor: int) -> bool:
    """Whether the lock is ours.  A folder itself is locked, so that no lock file is left in it."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks, such as some network disks
        return True
    return True


def _name_plainly(error: OSError, *, aside: Path, path: Path) -> None:
    """Let an error name the file that was asked for: writing names none, opening the hidden one."""
    named = error.filename
    if named is None:
        error.filename = str(path)
    elif str(named).startswith(str(aside)):
        error.filename = str(path) + str(named)[len(str(aside)) :]


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
