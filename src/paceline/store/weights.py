"""Named tensors in one safetensors file: read whole, matched strictly by name and shape, and never NaN or infinite.

It knows no draft and no optimiser; every fault is a CheckpointError that names the tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.store.faults import fault_advice
from paceline.store.files import write_bytes

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # narrower ones need scales that we do not know
SHOWN = 4  # names listed in an error; the rest are counted


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, whole or not at all, with their bytes on the disk before their name."""
    write_bytes(path, save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))


def read_tensors(path: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """Every tensor of a file.  Raises CheckpointError when it is missing, torn or no safetensors file."""
    try:
        return load_file(path, device=device)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; expected a safetensors file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it or write it again") from error


def check_finite(tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Raises CheckpointError naming the tensors that hold NaN or infinity."""
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if bad:
        raise CheckpointError(f"{where}: NaN or infinity in {listed(bad)}; expected finite weights")


def check_fit(found: Mapping[str, Tensor], *, expected: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError unless both hold the same names with the same shapes and kinds of number."""
    faults: list[str] = []
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        faults.append(f"missing {listed(missing)}")
    if unexpected:
        faults.append(f"unexpected {listed(unexpected)}")
    for name in sorted(found.keys() & expected.keys()):
        have, want = found[name], expected[name]
        if have.shape != want.shape:
            faults.append(f"{name} has shape {list(have.shape)}, expected {list(want.shape)}")
        elif have.dtype not in FLOATS if want.is_floating_point() else have.is_floating_point():
            faults.append(f"{name} is {have.dtype}, expected {want.dtype}")
    if faults:
        more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
        raise CheckpointError(f"{where}: {'; '.join(faults[:SHOWN])}{more}; expected the tensors of its configuration")


def fill_module(module: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Put tensors into a module, strictly both ways.

    Parameters are NaN before, so that one that is not written cannot pass as a fresh weight.
    """
    check_fit(tensors, expected=module.state_dict(), where=where)
    check_finite(tensors, where=where)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.load_state_dict(dict(tensors), strict=True)
    check_finite(dict(module.named_parameters()), where=f"{where}, after loading")


@contextmanager
def refuse_full_disk(place: Path) -> Generator[None, None, None]:
    """Turn what the system says of a write that fails into one line; nothing half-written is left."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {place}: {error.strerror or error}; what was there is untouched: {fault_advice(error)}"
        ) from error


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
