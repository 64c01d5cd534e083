"""The parts drafts are built from: norm, gated MLP, grouped-query attention that takes tables and a mask.

No part knows a tree, a target or a training step: rotary tables, keys and masks come from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.ops.rotary import apply_rotary


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain: x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], same dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases.  out: width of the result, that of the input unless said."""

    def __init__(self, width: int, *, inner: int, out: int | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, out or width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., out]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output; projections and the product are apart.

    in_width: width of what is projected.  width: width of the result.
    """

    def __init__(
        self, in_width: int, *, width: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(in_width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(in_width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(in_width, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def queries(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries: x [B, n, in_width], cos/sin [B, n, C] -> [B, A, n, C]."""
        return apply_rotary(self._split(self.q_proj(x), self.heads), cos=cos, sin=sin)

    def keys_values(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values: -> two [B, A_kv, n, C]."""
        keys = apply_rotary(self._split(self.k_proj(x), self.kv_heads), cos=cos, sin=sin)
        return keys, self._split(self.v_proj(x), self.kv_heads)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor) -> Tensor:
        """Attention output [B, n, width].  mask: [B, 1, n, S] bool or additive."""
        return self.project(mix(queries, keys, values, mask=mask))

    def project(self, mixed: Tensor) -> Tensor:
        """Mixed values [B, A, n, C] -> [B, n, width]."""
        batch, heads, rows, width = mixed.shape
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, heads * width))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


def mix(queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor) -> Tensor:
    """Grouped-query attention before its last projection: [B, A, n, C], [B, A_kv, S, C] twice -> [B, A, n, C].

    mask: [B, 1, n, S] bool or additive.  The groups of query heads are folded into rows, so that keys and values are
    read once and never repeated.
    """
    batch, heads, rows, width = queries.shape
    groups = heads // keys.shape[1]
    folded = queries.reshape(batch, keys.shape[1], groups * rows, width)
    tiled = mask.expand(-1, -1, rows, -1).repeat(1, 1, groups, 1) if groups > 1 else mask
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=tiled)
    return mixed.reshape(batch, heads, rows, width)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a draft's layer is made of where it is a Llama layer on [norm(embedding); norm(feature)].

    embed_norm, feature_norm: before attention.  mlp_norm: before the MLP.  norm, head: after the layer.
    """

    embed_norm: RMSNorm
    feature_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP
    norm: RMSNorm
    head: nn.Linear
