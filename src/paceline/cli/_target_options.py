"""Options of a target that several commands share, with the one text that explains each.

It knows how they are spelled; whether a name is one of torch's is decided where the target is loaded.
"""

from typing import Annotated

import typer

Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option("--device", help="As torch spells it.")]
