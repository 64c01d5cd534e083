"""The gain of a target's final norm, from which a draft may start; measured, because families store it differently.

It knows no draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


@torch.no_grad()
def final_gain(model: Any) -> Tensor | None:
    """[H] float32: what the norm before the head multiplies with; None where there is none of a known name.

    Families store w or 1 + w.  The probe alternates between 1 and -1: its mean is 0 and its mean square 1, so the gain
    comes out with the probe's signs, exact up to the norm's eps.
    """
    decoder = model.get_decoder()
    norm = next((found for name in FINAL_NORMS if isinstance(found := getattr(decoder, name, None), nn.Module)), None)
    if norm is None:
        return None
    like = model.get_output_embeddings().weight
    signs = torch.ones(like.shape[1], device=like.device, dtype=like.dtype)
    signs[1::2] = -1
    return (norm(signs[None, None]).flatten() * signs).float()
