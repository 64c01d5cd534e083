"""`paceline results`: make the marked blocks of documents anew from records, or check that nothing has to change.

It reads and writes files; what a block holds is decided by `measure.report`, what an excerpt by `measure.excerpt`.
"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command

STALE = 1  # exit code of --check when a document differs from its records


def results(
    documents: Annotated[
        list[Path], typer.Argument(help="Markdown with marked blocks, JSON excerpts.", metavar="DOCUMENT")
    ],
    records: Annotated[Path, typer.Option("--records", "-r", help="Folder of records (*.json).")] = Path(
        "docs/results"
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 when a document is stale.")
    ] = False,
) -> None:
    """Rewrite the tables of documents from the records that `paceline bench` wrote.

    A block stands between `<!-- results:core -->` and `<!-- /results -->` and is filled from core-*.json;
    `results:core-summary` gives one row per record. A document *.json is an excerpt of the record that it names.
    """
    from rich.console import Console

    from paceline.errors import ConfigError
    from paceline.measure.excerpt import rewrite_excerpt
    from paceline.measure.record import read_records
    from paceline.measure.report import rewrite_blocks
    from paceline.store.files import write_text

    console = Console(highlight=False, soft_wrap=True)
    known = read_records(records) if records.is_dir() else {}
    if not known:  # tables that are filled would be emptied
        found = "no record (*.json) in it" if records.is_dir() else "no such folder"
        raise ConfigError(f"--records: {records}: {found}; expected the folder of records that `paceline bench` wrote")
    stale: list[str] = []
    for path in documents:
        if not path.is_file():
            raise typer.BadParameter(f"no file {path}")
        before = _text(path)
        rewrite = rewrite_excerpt if path.suffix == ".json" else rewrite_blocks
        after = rewrite(before, records=known)
        if before == after:
            continue
        stale.append(path.name)
        if not check:
            write_text(path, after)
    done = f"{len(known)} records, {len(documents)} documents"
    console.print(f"{done}, {'stale' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    if check and stale:
        raise typer.Exit(STALE)


def _text(path: Path) -> str:
    from paceline.errors import DataError

    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; expected a document in UTF-8: save it so") from error


PLUGIN = Command(run=results, group="Measure", order=30)
