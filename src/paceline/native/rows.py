"""Attention of one query token per row over bfloat16 keys and values of rows of different lengths.

It knows neither models nor caches: whoever calls it says how many slots a row sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.native.build import Unavailable
from paceline.native.library import Library, Rows


def attend(library: Library, query: Tensor, keys: Tensor, values: Tensor, *, counts: Tensor, scale: float) -> Tensor:
    """softmax(scale * query keys^T) values over the first counts[b] slots of row b; sums in float32.

    query: [B, A, 1, C] bfloat16.  keys, values: [B, A_kv, view, C] bfloat16; A a multiple of A_kv.  counts: [B] int64,
    1 to view.  Returns [B, 1, A, C] bfloat16; a row's result depends on nothing but that row.  Raises Unavailable for
    tensors of another kind, shape or layout, and for a scale that is not positive.
    """
    batch, heads, _one, width = query.shape
    if not torch.finfo(torch.float32).tiny <= scale <= torch.finfo(torch.float32).max:
        raise Unavailable(f"its attention is scaled by {scale}")  # times minus infinity it would be no number
    _refuse_kind(library, query, keys, values, counts)
    query, counts = query.contiguous(), counts.contiguous()
    out = query.new_empty(batch, 1, heads, width)
    key_heads, view, team = keys.shape[1], keys.shape[2], library.team
    rows = Rows(
        batch, key_heads, heads // key_heads, width, view, min(torch.get_num_threads(), batch * key_heads),
        keys.stride(0), keys.stride(1), query.data_ptr(), keys.data_ptr(), values.data_ptr(), counts.data_ptr(),
        out.data_ptr(), team.parallel, team.thread_number, team.thread_count, scale,
    )  # fmt: skip
    code = library.attend(rows)
    if code:
        raise Unavailable(_FAULTS[code])
    return out


def _refuse_kind(library: Library, query: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> None:
    batch, heads, nodes, width = query.shape
    for tensor in (query, keys, values):
        if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
            raise Unavailable(f"its attention is in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}")
    if nodes != 1 or keys.shape != values.shape or (keys.shape[0], keys.shape[3]) != (batch, width):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, keys, values))
        raise Unavailable(f"its queries, keys and values are shaped {shapes}")
    if heads % keys.shape[1]:
        raise Unavailable(f"its {heads} heads do not share {keys.shape[1]} key heads evenly")
    if width < library.narrowest or width % 2:
        raise Unavailable(f"its head width of {width} is odd or below {library.narrowest}")
    if keys.stride() != values.stride() or keys.stride()[2:] != (width, 1):
        raise Unavailable("its keys and values do not lie slot behind slot")
    if counts.dtype != torch.int64 or counts.shape != (batch,) or counts.device.type != "cpu":
        raise Unavailable(f"the lengths of its rows are {counts.dtype} of {tuple(counts.shape)}")


_FAULTS = {
    1: "a row sees no slot, or more slots than are shown",
    2: "memory for the scores of attention is short",
}
