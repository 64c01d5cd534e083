"""Commands that we print or write down are commands that there are: each is parsed as the command line parses it."""

import json
import re
import shlex

import pytest
import typer

from fixtures_commands import GROUP, commands, parse
from house.source import ROOT, modules
from paceline.cli import __main__ as cli
from paceline.cli import demo
from paceline.cli._plans import parse_plan
from paceline.config import load_recipe

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def written():
    return [line for path in DOCUMENTS for block in FENCED.findall(path.read_text("utf-8")) for line in commands(block)]


@pytest.mark.parametrize("line", written())
def test_every_command_of_the_documents_can_be_given(line):
    parse(line)


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """What the demo prints, without the work; and the folder that it works in."""
    recorded = json.loads((ROOT / "docs/results/core-smollm2.json").read_text("utf-8"))

    def run(arguments):
        out = parse(shlex.join(["paceline", *arguments])).get("out")
        if arguments[0] == "bench":
            out[0].write_text(json.dumps(recorded | {"n": 8, "s_wall": 1.09, "s_wall_ci95": [0.68, 1.77]}))
        if arguments[0] == "train":
            assert load_recipe(arguments[1]).data.train == (str(tmp_path / "demo" / "rows" / "rows.jsonl"),)
        return 0

    real = cli.run
    monkeypatch.setattr(cli, "run", run)
    assert real(["demo", "--out", str(tmp_path / "demo")]) == 0
    return capsys.readouterr().out, tmp_path / "demo"


def test_every_command_that_the_demo_prints_can_be_given(shown):
    lines = commands(shown[0])
    names = [line.split()[1] for line in lines]
    assert names == ["fetch", "bench", "generate", "synth", "train", "synth", "train", "bench"]
    given = [parse(line) for line in lines]
    assert load_recipe(ROOT / given[-2]["recipe"], overrides=given[-2]["changes"]).data.train == (
        str(given[-3]["out"] / "rows.jsonl"),
    )
    assert given[-1]["draft"] == str(given[-2]["out"] / "best")


def test_what_the_demo_points_at_is_kept(shown):
    text, folder = shown
    assert f"Kept: {folder}, " in text
    assert (folder / "demo.json").is_file()


def test_a_demo_of_few_prompts_stands_beside_the_recorded_figures(shown):
    here, recorded = re.search(r"here: +(.*)\nrecorded: +(.*)\n", shown[0]).groups()
    assert here == "accepted length 2.05, 1.09x plain decoding (95 % interval 0.68 to 1.77), 8 prompts"
    assert re.fullmatch(r"accepted length \d\.\d\d, \d\.\d\dx plain .* 160 prompts; 2 threads of .*", recorded)


def test_a_demo_does_not_write_into_what_is_there(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.run(["demo", "--out", str(tmp_path)]) == cli.MISTAKE
    assert "holds files; expected a new folder, or an empty one" in capsys.readouterr().err


def test_the_recorded_figures_are_of_what_the_demo_runs():
    recorded = json.loads((ROOT / "src/paceline/shipped" / demo.DRAFT / demo.MEASURED).read_text("utf-8"))
    assert (recorded["target"], recorded["draft"]["name"]) == (demo.TARGET, demo.DRAFT)
    assert recorded["plan"] == str(parse_plan(demo.PLAN))


def advice():
    """(where, command, options) wherever the text of the package tells somebody to give an option of a command."""
    for module in modules():
        for match in re.finditer(r"paceline ([a-z][a-z-]*)((?: [^\s`'\";,)]+)*)", module.text):
            if match[1] in GROUP.commands:
                yield module.path, match[1], re.findall(r"(?<![\w-])--[a-z-]+", match[2])


@pytest.mark.parametrize(("where", "name", "options"), list(advice()))
def test_every_option_that_a_message_names_is_there(where, name, options):
    known = {one for each in GROUP.commands[name].params for one in (*each.opts, *each.secondary_opts)}
    assert set(options) <= known, where


def test_a_command_that_lacks_an_option_is_caught():
    with pytest.raises(typer.BadParameter.__bases__[0], match="target"):
        parse("paceline bench --draft run/best --workload PROMPTS.jsonl --out record.json")
    with pytest.raises(typer.BadParameter.__bases__[0], match="--sorce"):
        parse("paceline fetch smollm2 --sorce hub")
