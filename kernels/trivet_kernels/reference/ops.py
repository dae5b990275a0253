"""The operations between matrix products, in torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from trivet_kernels.ops import Ops

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceOps(Ops):
    """Plain PyTorch, in float32 (float64 stays what it is)."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        return _store(_normalised(_wide(x), weight, eps), x.dtype, out)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        residual.copy_(_wide(residual) + _wide(x))
        return self.rms_norm(residual, weight, eps, out)

    def rotary(
        self,
        query: Tensor,
        key: Tensor,
        positions: Tensor,
        table: Tensor,
        *,
        interleaved: bool = False,
        query_weight: Tensor | None = None,
        key_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        cos, sin = table[positions][:, None].chunk(2, dim=-1)
        width = table.shape[-1]
        for heads, weight in ((query, query_weight), (key, key_weight)):
            wide = _wide(heads)
            if weight is not None:
                wide = _normalised(wide, weight, eps)
            pairs = wide[..., :width]
            first, second = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, dim=-1)
            turned = first * cos - second * sin, second * cos + first * sin
            joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
            heads.copy_(torch.cat((joined, wide[..., width:]), dim=-1))

    def silu_and_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        gate, up = _wide(x).chunk(2, dim=-1)
        return _store(functional.silu(gate) * up, x.dtype, out)

    def gelu_and_mul(self, x: Tensor, out: Tensor | None = None, *, approximate: bool = True) -> Tensor:
        gate, up = _wide(x).chunk(2, dim=-1)
        return _store(functional.gelu(gate, approximate="tanh" if approximate else "none") * up, x.dtype, out)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _store(values: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return values.to(dtype) if out is None else out.copy_(values)
