"""Work done in a child process that is killed with SIGKILL at a chosen moment of a save.

A fork shares the parent's imports, so that a kill costs milliseconds; the tests run on one thread, which a fork keeps.
"""

import os
import signal
import traceback
from collections.abc import Callable

from paceline.store import files


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked child; its exit code, negative the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  the child must never come back into the test runner
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def die_at_flush(number: int, *, where: str = "") -> None:
    """From now on the process kills itself before its `number`-th flush of a path with `where` in it."""
    seen: list[object] = []
    flush = files._flush

    def counting(path: object) -> None:
        seen.extend([path] if where in str(path) else [])
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(path)  # type: ignore[arg-type]

    files._flush = counting


def die_at_rename(number: int, *, where: str = "") -> None:
    """From now on the process kills itself before its `number`-th rename of a path with `where` in it."""
    seen: list[object] = []
    rename = files.Path.rename

    def counting(self: files.Path, target: object) -> files.Path:
        seen.extend([self] if where in str(self) else [])
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)  # type: ignore[arg-type]

    files.Path.rename = counting  # type: ignore[method-assign]
