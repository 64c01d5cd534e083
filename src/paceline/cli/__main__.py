"""The command line: dispatch, and turn a user's mistake, a full disk and Ctrl-C into one line.

It imports next to nothing before it can answer Ctrl-C; the commands are found by `_app`.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from paceline.errors import Interrupted, PacelineError

MISTAKE = 2  # exit code for a fault of the user, a file or a configuration
INTERRUPTED = 130  # 128 + SIGINT


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; a user's mistake is one line on stderr and never a traceback."""
    import typer

    from paceline.cli._app import build_app
    from paceline.store.faults import fault_line, is_out_of_memory

    # The base class of what typer raises for a wrong option or argument.  typer 0.16 takes it from click, newer ones
    # carry their own copy of click and do not export it; BadParameter is exported by all and derives from it.
    usage_error: Any = typer.BadParameter.__bases__[0]
    try:
        code = build_app()(args=list(arguments) or ["--help"], prog_name="paceline", standalone_mode=False)
    except usage_error as error:
        context = f"{error.ctx.command_path} --help" if error.ctx else "paceline --help"
        return _complain(f"{error.format_message()} (see: {context})")
    except Interrupted as error:
        return _complain(str(error), code=INTERRUPTED)
    except PacelineError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(fault_line(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = f" ({str(error).splitlines()[0][:200]})" if str(error) else ""
        return _complain(f"not enough memory{said}; ask for less at once, or free memory")
    if code == INTERRUPTED:  # newer typers make this code of KeyboardInterrupt
        return _complain("interrupted", code=INTERRUPTED)
    return code if isinstance(code, int) else 0


def _complain(message: str, *, code: int = MISTAKE) -> int:
    """One line on stderr, whatever the message; returns the exit code."""
    print("paceline:", *message.split(), file=sys.stderr)
    return code


def _on_interrupt(_number: int, frame: FrameType | None) -> None:
    """Ctrl-C.  A library whose import is broken off fails in ways of its own, so there the process ends at once.

    Nothing is lost by that: commands import before they work.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"paceline: interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `paceline` script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has told us to ignore it
        signal.signal(signal.SIGINT, _on_interrupt)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
