"""What the system says of a file that cannot be read or written, as one line that says what to do.

It knows error numbers, and nothing of what the file is for.  Memory that is not there is told apart from our own bugs.
"""

import errno
from pathlib import Path

_SPACE = "free space and run again"
_PLACE = "it cannot be written to; choose another --out"
_ADVICE = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EROFS: _PLACE,
    errno.EACCES: _PLACE,
    errno.EPERM: _PLACE,
    errno.ENOTDIR: "a part of it is a file, expected folders; choose another --out",
    errno.EEXIST: "it is a file, expected a folder; choose another --out",
    errno.EISDIR: "it is a folder, expected a file; choose another name",
    errno.ENOENT: "a folder of it is missing and cannot be made, or there is no such file; check the path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def fault_advice(error: OSError) -> str:
    """What to do about it, as the end of a line."""
    return _ADVICE.get(error.errno or 0, "check the path and the disk")


def fault_line(error: OSError, *, place: Path | None = None) -> str:
    """The whole line.  place: the file or folder, where the system names none."""
    where = error.filename or place
    said = error.strerror or str(error) or type(error).__name__
    return f"{f'{where}: ' if where else ''}{said}; {fault_advice(error)}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a MemoryError, or a RuntimeError of torch, says that memory was asked for and not given."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said
