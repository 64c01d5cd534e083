"""Work in a process of its own: its memory is the system's again when it ends, and it ends with the one that asked.

A killed parent takes the child along, so that a study that is started again never finds its folder taken.  What the
child prints goes to a log file.  It knows no training and no benchmark.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

Tell = Callable[[int, int, str], None]  # (things done, things in all, figures) of a child's work
FAULT = 1  # exit code of a child that ends on an error that is no user's


def run_child(work: Callable[..., None], arguments: tuple[Any, ...], *, log: Path, hear: Tell) -> None:
    """Call `work(tell, *arguments)` in a new process and wait for it.

    work: a function at the top level of a module; arguments: what can be sent to another process.
    log: takes what it prints, behind what is there.  hear: called with what the work tells.
    Raises PacelineError with the line of the child's own, or naming the log when it ended in another way.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, which do not survive it
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(theirs, str(log), work, arguments), daemon=True)
    process.start()
    theirs.close()
    refusal: str | None = None
    try:
        while True:
            try:
                kind, values = ours.recv()
            except EOFError:
                break
            if kind == "refused":
                refusal = values
            else:
                hear(*values)
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
        ours.close()
    if refusal is not None:
        raise PacelineError(refusal)
    if process.exitcode != 0:
        raise PacelineError(
            f"its process ended with code {process.exitcode}: see the end of {log}; the same command goes on"
        )


def _main(connection: Connection, log: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The child: never outlives its parent, and answers Ctrl-C by leaving it to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

    def tell(done: int, total: int, figures: str) -> None:
        connection.send(("told", (done, total, figures)))

    try:
        work(tell, *arguments)
    except PacelineError as error:
        with suppress(OSError):
            connection.send(("refused", str(error)))
        sys.exit(FAULT)
    except (MemoryError, RuntimeError, OSError):
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(FAULT)
    finally:
        sys.stdout.flush()
        connection.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child runs this"
    wait([parent.sentinel])
    os._exit(FAULT)
