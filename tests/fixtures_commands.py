"""Commands in texts, parsed as the command line parses them."""

import re
import shlex

import typer

from house.source import ROOT
from paceline.cli._app import build_app
from paceline.cli._plans import parse_plan
from paceline.config import load_recipe

GROUP = typer.main.get_command(build_app())


def parse(line):
    """Parse `paceline COMMAND ...` with the real parser, recipe and overrides included; nothing is run."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "paceline"
    command = GROUP.commands[name]
    given = command.make_context(name, arguments).params
    if "recipe" in given and (ROOT / given["recipe"]).is_file():
        load_recipe(ROOT / given["recipe"], overrides=given["changes"] or [])
    if given.get("plan"):
        for plan in [given["plan"]] if isinstance(given["plan"], str) else given["plan"]:
            parse_plan(plan)
    return given


def commands(text):
    """The lines of a text that are commands of ours, continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"\s*(\$ )?paceline [a-z]", line)]
