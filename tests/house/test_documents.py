"""The documents speak of files that exist."""

import re

import pytest

from house.source import PACKAGE, ROOT

NAMED = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|toml|json))`")


@pytest.mark.parametrize("document", ["README.md", "docs/papers.md", "docs/glossary.md"])
def test_files_named_in_a_document_exist(document):
    named = NAMED.findall((ROOT / document).read_text("utf-8"))
    assert not [name for name in named if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()]


def test_every_draft_and_operation_is_in_the_table_of_papers():
    table = (ROOT / "docs" / "papers.md").read_text("utf-8")
    files = [
        *PACKAGE.glob("drafts/[!_]*.py"),
        *PACKAGE.glob("training/objectives/[!_]*.py"),
        *PACKAGE.glob("ops/[!_]*.py"),
    ]
    assert not [file.stem for file in files if str(file.relative_to(PACKAGE)) not in table]
