"""`paceline convert`: a draft folder from or to a foreign format; what a format holds is known in `interop`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._base import Command


def convert(
    source: Annotated[Path, typer.Argument(help="Draft folder: ours, or of the format named by --from.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    target: Annotated[str, typer.Option("--target", "-t", help="Target that the draft works for.")],
    from_: Annotated[str | None, typer.Option("--from", help="Foreign format to read: eagle, dflash.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Foreign format to write: eagle, dflash.")] = None,
) -> None:
    """Read a published draft (--from FORMAT) or write one that serving engines load (--to FORMAT)."""
    import torch
    from rich.console import Console

    from paceline.cli._opening import check_draft
    from paceline.errors import ConfigError
    from paceline.interop._base import Format
    from paceline.plugins import load_plugin
    from paceline.store.checkpoint import load_draft, save_draft
    from paceline.store.hub import load_target

    if (from_ is None) == (to is None):
        raise ConfigError("convert: give one of --from FORMAT and --to FORMAT")
    if out.exists():
        raise ConfigError(f"{out}: exists; expected a new folder")
    kind = load_plugin("interop", name=from_ or to or "")
    assert isinstance(kind, Format)
    if from_ is not None:
        if not source.is_dir():
            raise ConfigError(f"SOURCE: no folder '{source}'; expected one in the format {from_}")
        kind.check(source)
        loaded = kind.read(source, load_target(target))
        save_draft(out, loaded.draft, info=loaded.info, dtype=loaded.dtype)
    else:
        check_draft(str(source), option="SOURCE", others=())
        loaded = load_draft(str(source), target=load_target(target), dtype=torch.float32)
        kind.write(loaded, out)
    Console(highlight=False, soft_wrap=True).print(f"written: {out}, {loaded.dtype}")


PLUGIN = Command(run=convert, group="Use", order=30)
