"""The Hub door: a name becomes a model, a tokenizer or a target; nobody else calls `from_pretrained`.

A name is a local folder, a Hub id, or an embedded target.  This module knows neither drafts nor how a target is used.
Only safetensors are read, and code from the Hub runs only if the user asks for it.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import TargetError
from paceline.machine import check_device
from paceline.store.embedded import EMBEDDED, cached_folder
from paceline.store.faults import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.targets.generic import Target

DTYPES = ("float32", "bfloat16", "float16")
CACHE_LINE = 64  # bytes
WEIGHT_FAULTS = ("state_dict", "size mismatch", "mismatched")  # RuntimeErrors of torch that are the weights' fault
TRANSFORMERS = ((4, 57), (6, 0))  # first version that works, first that is not known to


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """Where a name leads: a folder of this machine, or a repository on the Hub (folder None)."""

    name: str
    folder: Path | None
    repository: str | None
    revision: str | None

    @property
    def location(self) -> str:
        """What transformers is given."""
        return str(self.folder) if self.folder is not None else str(self.repository)


def find_target(name: str, *, revision: str | None = None) -> TargetPlace:
    """Resolve a name without loading anything and without the network.

    name: a folder with a config.json; `smollm2`, `smollm2@hub` or `smollm2@wheel`; or a Hub id `owner/model`.
    A folder named like an embedded target needs a `./` in front.  Raises TargetError that says what to do.
    """
    if name.partition("@")[0] in EMBEDDED:
        if revision is not None:
            raise TargetError(f"{name}: found revision '{revision}', expected none; choose {name}@hub or {name}@wheel")
        folder = cached_folder(name)
        if folder is None:
            raise TargetError(f"{name} is not on this machine yet; run: paceline fetch {name}")
        return TargetPlace(name, folder, None, None)
    folder = Path(os.path.expanduser(name))  # unlike Path's, it has an answer for every ~name
    if name and os.path.isdir(folder):  # unlike Path's, it has an answer for a name that is too long
        if not (folder / "config.json").is_file():
            raise TargetError(f"{name}: a folder without config.json, expected a model saved by transformers")
        return TargetPlace(name, folder, None, None)
    is_path = name.startswith((".", "~", os.sep)) or os.path.exists(folder)
    if not is_path and name.count("/") == 1 and all(name.split("/")):
        return TargetPlace(name, None, name, revision)
    near = get_close_matches(name, EMBEDDED, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise TargetError(
        f"{name}: no such target; {hint}expected a model folder, a Hub id owner/model or {', '.join(EMBEDDED)}"
    )


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a target.  Arguments as in `load_target`; raises TargetError."""
    _require_transformers()
    from transformers import AutoTokenizer

    place = find_target(name, revision=revision)
    try:
        return AutoTokenizer.from_pretrained(
            place.location, revision=place.revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"{name}: its tokenizer cannot be loaded: {_reason(error, place=place)}") from error


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """A causal language model in evaluation mode, its weights frozen.

    Arguments as in `load_target`.  Raises TargetError: unknown name or dtype, no safetensors, unsupported architecture,
    a model that asks for remote code, or weights that do not fit the architecture; ConfigError: a device that is not
    there.
    """
    _require_transformers()
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise TargetError(f"found dtype '{dtype}', expected one of {', '.join(DTYPES)}")
    check_device(device)
    place = find_target(name, revision=revision)
    loader: Any = AutoModelForCausalLM  # its annotations do not know output_loading_info
    try:
        with _no_progress_bars() if place.repository is None else nullcontext():
            model, report = loader.from_pretrained(
                place.location,
                revision=place.revision,
                dtype={"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype],
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, MemoryError, SafetensorError) as error:
        raise TargetError(f"{name}: cannot be loaded: {_reason(error, place=place)}") from error
    _require_every_weight(name, report)
    _align_weights(model)
    return model.to(device).eval().requires_grad_(False)


def load_target(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    taps: tuple[int, ...] = (),
) -> "Target":
    """Load a target with its tokenizer, ready to prefill, score and commit.

    name: as in `find_target`; a Path is always a folder.  revision: Hub branch, tag or commit.
    dtype: float32, bfloat16 or float16.  device: as torch spells it.
    trust_remote_code: run code that a Hub repository brings.
    taps: 0-based decoder layers whose outputs are returned.  Raises TargetError, ConfigError.
    """
    from paceline.targets.generic import Target

    name = _spelled(name)
    tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    model = load_model(name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return Target(model, tokenizer=tokenizer, taps=taps, name=name)


def _spelled(name: object) -> str:
    """A name as `find_target` reads it.  Raises TargetError for what is none."""
    if isinstance(name, str):
        return name
    if isinstance(name, Path):
        text = os.path.expanduser(name)
        return text if os.path.isabs(text) else os.path.join(os.curdir, text)
    raise TargetError(
        f"found a {type(name).__name__}, expected a model folder, a Hub id or {', '.join(EMBEDDED)}; a model that is "
        "loaded already becomes a target by paceline.Target(model, tokenizer=tokenizer)"
    )


def _require_transformers() -> None:
    """Refuse a version of transformers outside the range that is tested, before anything is loaded."""
    found = version("transformers")
    first, end = TRANSFORMERS
    if not first <= tuple(int(part) for part in found.split(".")[:2]) < end:
        raise TargetError(
            f"found transformers {found}, expected >= {first[0]}.{first[1]} and < {end[0]}; "
            f"run: pip install 'transformers>={first[0]}.{first[1]},<{end[0]}'"
        )


def _require_every_weight(name: str, report: dict[str, Any]) -> None:
    """transformers fills a weight that is missing with random numbers and goes on; here that is an error."""
    for fault in ("missing_keys", "mismatched_keys"):
        keys = sorted(map(str, report.get(fault, ())))
        if keys:
            raise TargetError(
                f"{name}: {len(keys)} {fault.replace('_', ' ')} in its weights, first {keys[0]}; "
                "expected weights that fit its config.json; download it again"
            )


def _align_weights(model: Any) -> None:
    """Move weights that straddle cache lines, as those of a mapped file do, to memory of their own.

    Every vector read of them costs two lines else: about a tenth of a call that reads all weights once.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()


def _reason(error: Exception, *, place: TargetPlace) -> str:
    """The first line of what transformers says, which is usually a paragraph, and what to look at."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0][:300] if lines else type(error).__name__
    if is_out_of_memory(error):
        return f"{said}; free memory, or choose a smaller target or dtype"
    if isinstance(error, RuntimeError) and not any(word in str(error) for word in WEIGHT_FAULTS):
        return f"{said}; check what this machine allows (memory, threads), then the target"
    check = "the folder" if place.repository is None else "the name, the network and your access to the repository"
    return f"{said}; check {check}"


@contextmanager
def _no_progress_bars() -> Generator[None, None, None]:
    """Loading from a disk takes seconds; transformers' bars would only break up our own output."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()
