"""The command line: find the commands, parse, dispatch, and turn a user's mistake into one line.

It knows no command by name: each file of this folder is one, and imports what is heavy when it runs.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli._base import Command
from paceline.errors import PacelineError
from paceline.plugins import load_plugin, plugin_names

MISTAKE = 2  # exit code for a fault of the user, a file or a configuration
INTERRUPTED = 130  # 128 + SIGINT

HELP = """Train draft models for speculative decoding, decode with them losslessly, and prove it.

A small *draft* proposes several tokens, the *target* checks them in one call and keeps those that it would have
written itself: the same text, fewer calls.

`paceline COMMAND --help` explains a command. A mistake is answered in one line, with exit code 2.
"""

# The base class of what typer raises for a wrong option or argument.  typer 0.16 takes it from click, newer ones
# carry their own copy of click and do not export it; BadParameter is exported by all and derives from it.
UsageError: Any = typer.BadParameter.__bases__[0]


def build_app() -> typer.Typer:
    """The application with every command of this folder, in the order in which a newcomer meets them."""
    app = typer.Typer(
        name="paceline",
        help=HELP,
        rich_markup_mode="markdown",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(_options)
    commands: dict[str, Command] = {name: load_plugin("cli", name=name) for name in plugin_names("cli")}
    for name, command in sorted(commands.items(), key=lambda item: (item[1].place, item[0])):
        app.command(name.replace("_", "-"), rich_help_panel=command.group)(command.run)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `paceline` itself; its help text is HELP."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; a user's mistake is one line on stderr and never a traceback."""
    try:
        code = build_app()(args=list(arguments) or ["--help"], prog_name="paceline", standalone_mode=False)
    except UsageError as error:
        context = f"{error.ctx.command_path} --help" if error.ctx else "paceline --help"
        return _complain(f"{error.format_message()} (see: {context})")
    except PacelineError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("paceline: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    """One line on stderr, whatever the message; returns the exit code."""
    print("paceline:", *message.split(), file=sys.stderr)
    return MISTAKE


def main() -> None:
    """Entry point of the `paceline` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
