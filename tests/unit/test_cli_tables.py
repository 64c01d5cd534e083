"""Tables on a terminal of 80 columns: no line is longer, no word of a cell is broken or lost."""

import io

import pytest
from rich.console import Console

from house.source import ROOT
from paceline.cli._tables import drawn
from paceline.measure.record import read_records
from paceline.measure.report import RENDERERS
from paceline.measure.table import Table

RECORDS = read_records(ROOT / "docs" / "results")


def shown(table):
    out = io.StringIO()
    Console(file=out, width=80, highlight=False, soft_wrap=True).print(drawn(table))
    return out.getvalue().removeprefix(f"{table.title}\n")  # a title is a line of text, which a terminal folds


@pytest.mark.parametrize("name", RECORDS)
def test_no_table_of_a_record_is_cut_or_broken(name):
    for table in RENDERERS[RECORDS[name]["kind"]](RECORDS[name]):
        text = shown(table)
        assert max(map(len, text.splitlines())) <= 80, table.title
        for words in (*table.heads, *(cell for row in table.rows for cell in row)):
            assert set(words.split()) <= set(text.split()), words


def test_the_name_of_a_workload_file_is_not_broken():
    heads = ("file", "n", "L", "speed-up", "plain tok/s", "draft tok/s")
    figures = ("8", "1.97 \u00b1 0.04", "1.28 \u00b1 0.02", "140.6 \u00b1 0.6", "151.9 \u00b1 1.2")
    lines = shown(Table("By workload file", heads, (("demo_prompts.jsonl", *figures),))).splitlines()
    assert " ".join(lines[-2].split()) == " ".join(("demo_prompts.jsonl", *figures))
