"""Who a target is: a digest of its weights, the names of its tokens, and the sizes a draft depends on.

It knows no draft.  The digest does not depend on the device or on the floating-point type in which a target was loaded.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.records import TargetIdentity
from paceline.store.manifest import without_folders

if TYPE_CHECKING:
    from paceline.targets.generic import Target

SAMPLE = 256  # elements of each tensor whose places count; every element is in the sum
CHUNK = 1 << 24  # elements that are rounded at once


def identify_target(target: Target) -> TargetIdentity:
    """The identity of a loaded target; reads every weight once (0.2 s for 135 M of them on one CPU core)."""
    return TargetIdentity(
        name=without_folders(target.name),
        digest=weights_digest(target.model),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        tokens=token_names(target.tokenizer, limit=target.vocab_size),
    )


def weights_digest(model: nn.Module) -> str:
    """sha256 (hex) over name, shape, a sum over all elements and 256 elements of each parameter.

    Every element is rounded to bfloat16 first, so that the same weights in float32 and bfloat16 agree; its bits are
    summed as integers, so that the order of the sum is nothing.  A weight that moves by less than half a bfloat16 step
    is not seen, nor are two moves that cancel in the sum and miss the sample.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(0, max(len(flat) - 1, 0), SAMPLE, dtype=torch.float64).round().long()
        sample = _bits(flat[places.to(flat.device)]).cpu().numpy().astype("<i2").tobytes() if len(flat) else b""
        total = sum(int(_bits(chunk).sum(dtype=torch.int64)) for chunk in flat.split(CHUNK))
        digest.update(f"{name}{list(parameter.shape)}{total}".encode() + sample)
    return digest.hexdigest()


def token_names(tokenizer: Any, *, limit: int) -> tuple[str | None, ...]:
    """The name of each id below `limit`, None where the tokenizer has no token; empty without a tokenizer."""
    if tokenizer is None:
        return ()
    names: list[str | None] = [None] * limit
    for name, index in tokenizer.get_vocab().items():
        if index < limit:
            names[index] = name
    while names and names[-1] is None:  # padding rows of the embedding
        names.pop()
    return tuple(names)


def _bits(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).view(torch.int16)
