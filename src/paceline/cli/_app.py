"""The application: the commands of this folder on one help page.

It knows no command by name, and not what becomes of their errors.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline import __version__
from paceline.cli._base import Command
from paceline.plugins import load_plugin, plugin_names

HELP = """Train draft models for speculative decoding, decode with them losslessly, and prove it.

A small *draft* proposes several tokens, the *target* checks them in one call and keeps those that it would have
written itself: the same text, fewer calls.

`paceline COMMAND --help` explains a command. A mistake is answered in one line, with exit code 2.
"""


class PlainHelpCommand(TyperCommand):
    """A command whose help page is click's own.

    Rich lays options out in up to seven columns and cuts their names where a terminal has 80.  click puts a long name
    on a line of its own instead.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The page; ctx and formatter are click's, of which newer typers carry a copy of their own."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)


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
        app.command(name.replace("_", "-"), cls=PlainHelpCommand, rich_help_panel=command.group)(command.run)
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
