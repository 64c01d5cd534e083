"""Point the native forward at the weights of a one-layer draft, or say in a few words why it cannot be used.

It compiles and computes nothing; weights stay where the draft keeps them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from paceline.drafts._base import SequentialDraft
from paceline.drafts._layers import LayerParts
from paceline.native import library
from paceline.native.build import Unavailable


class NativeLayer:
    """A draft's layer in the form the library takes.

    embed: [V, H] rows that the target's embedding looks up.  Raises Unavailable with the reason.
    """

    def __init__(self, draft: SequentialDraft, embed: Tensor) -> None:
        parts = draft.layer_parts()
        if parts is None:
            raise Unavailable(f"the native forward does not know the layer of {type(draft).__name__}")
        modules: list[Any] = list(draft.modules())
        if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
            raise Unavailable("one of its modules has a hook")
        attention, mlp = parts.attention, parts.mlp
        hidden, inner = mlp.down_proj.out_features, mlp.down_proj.in_features
        width = attention.head_dim
        self._refuse_sizes(draft, parts, width=width, hidden=hidden, inner=inner)
        self._kept = [embed]  # whoever holds the struct holds the weights
        self._layer = library.Layer(
            q=self._matrix(attention.q_proj), k=self._matrix(attention.k_proj), v=self._matrix(attention.v_proj),
            o=self._matrix(attention.o_proj), gate=self._matrix(mlp.gate_proj), up=self._matrix(mlp.up_proj),
            down=self._matrix(mlp.down_proj), norm1=self._address(parts.feature_norm.weight),
            norm2=self._address(parts.mlp_norm.weight), window=0,
        )  # fmt: skip
        self.struct = library.Model(
            layers=1, hidden=hidden, heads=attention.heads, key_heads=attention.kv_heads, width=width, inner=inner,
            vocab=parts.head.out_features, words=len(embed), eps=parts.norm.eps, scale=width**-0.5,
            embed=self._address(embed), embed_norm=self._address(parts.embed_norm.weight),
            norm=self._address(parts.norm.weight), head=self._matrix(parts.head), layer=ctypes.addressof(self._layer),
        )  # fmt: skip

    def _refuse_sizes(self, draft: SequentialDraft, parts: LayerParts, *, width: int, hidden: int, inner: int) -> None:
        for name, size in {"head width": width, "hidden size": hidden, "inner size": inner}.items():
            if size % 16:
                raise Unavailable(f"its {name} of {size} is not a multiple of 16")
        turned = draft.tables(torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1]
        if turned != width:
            raise Unavailable(f"it rotates {turned} of the {width} numbers of a head")
        norms = (parts.embed_norm, parts.feature_norm, parts.mlp_norm, parts.norm)
        if len({norm.eps for norm in norms}) != 1:
            raise Unavailable("its norms differ in eps")

    def _matrix(self, linear: nn.Linear) -> library.Matrix:
        if type(linear) is not nn.Linear:
            raise Unavailable(f"a {type(linear).__name__} stands where a plain Linear was expected")
        bias = None if linear.bias is None else self._address(linear.bias)  # pyright: ignore[reportUnnecessaryComparison]
        return library.Matrix(self._address(linear.weight), bias)

    def _address(self, weight: Tensor) -> int:
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise Unavailable(f"its weights are {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
        if not weight.is_contiguous():
            raise Unavailable("a weight is not contiguous")
        self._kept.append(weight)
        return weight.data_ptr()
