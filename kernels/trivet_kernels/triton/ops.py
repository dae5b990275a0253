"""The operations between matrix products on CUDA and ROCm devices: one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from trivet_kernels.ops import Ops
from trivet_kernels.triton import activation
from trivet_kernels.triton.norm import add_norm_kernel, norm_kernel
from trivet_kernels.triton.rope import rotary_kernel

if TYPE_CHECKING:
    from torch import Tensor

#: columns that one program of a gated activation takes
_COLUMNS = 1024
#: elements of heads that one program of a rotation takes, about
_ROTATED = 1024


class TritonOps(Ops):
    """Triton kernels in float32 arithmetic. The elements of a row must be next to each other; rows may be anywhere."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if x.numel() == 0:
            return out
        # A row is addressed by two numbers, so that a slice of a wider [T, H, D] needs no copy.
        source, target = _three(x), _three(out)
        size = x.shape[-1]
        block = triton.next_power_of_2(size)
        norm_kernel[(source.shape[0] * source.shape[1],)](
            source,
            weight,
            target,
            source.shape[1],
            source.stride(0),
            source.stride(1),
            target.stride(0),
            target.stride(1),
            eps,
            size=size,
            block=block,
            num_warps=norm_warps(block),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if out is None else out
        if x.numel() == 0:
            return out
        for tensor in (x, residual, out):
            _check_rows(tensor)
        size = x.shape[-1]
        block = triton.next_power_of_2(size)
        add_norm_kernel[(len(x),)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            eps,
            size=size,
            block=block,
            num_warps=norm_warps(block),
        )
        return out

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
        if query.shape[0] == 0:
            return
        for tensor in (query, key, table):
            _check_rows(tensor)
        size, rotated = query.shape[-1], table.shape[-1]
        pairs, heads = rotary_blocks(rotated, size)
        grid = (query.shape[0], triton.cdiv(query.shape[1], heads) + triton.cdiv(key.shape[1], heads))
        rotary_kernel[grid](
            query,
            key,
            positions,
            table,
            query_weight,
            key_weight,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            table.stride(0),
            query.shape[1],
            key.shape[1],
            eps,
            interleaved=interleaved,
            norm_query=query_weight is not None,
            norm_key=key_weight is not None,
            size=size,
            rotated=rotated,
            pairs=pairs,
            rest=triton.next_power_of_2(max(size - rotated, 1)),
            block_heads=heads,
            num_warps=4,
        )

    def silu_and_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _gated(x, out, activation.SILU.value)

    def gelu_and_mul(self, x: Tensor, out: Tensor | None = None, *, approximate: bool = True) -> Tensor:
        return _gated(x, out, (activation.GELU_TANH if approximate else activation.GELU_ERF).value)


def norm_warps(block: int) -> int:
    """Warps of a norm's program that takes rows of up to ``block`` elements."""
    return min(max(block // 512, 1), 16)


def rotary_blocks(rotated: int, size: int) -> tuple[int, int]:
    """Pairs of elements, rounded up to a power of two, and heads of ``size`` that one program of a rotation takes."""
    return triton.next_power_of_2(rotated // 2), max(1, _ROTATED // triton.next_power_of_2(size))


def _gated(x: Tensor, out: Tensor | None, kind: int) -> Tensor:
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device) if out is None else out
    if out.numel() == 0:
        return out
    for tensor in (x, out):
        _check_rows(tensor)
    activation.gated_kernel[(len(x), triton.cdiv(size, _COLUMNS))](
        x, out, x.stride(0), out.stride(0), size, kind=kind, block=_COLUMNS, num_warps=4
    )
    return out


def _three(x: Tensor) -> Tensor:
    """A view ``[A, B, N]`` of ``[…, N]``."""
    _check_rows(x)
    if x.dim() < 3:
        return x.view(1, -1, x.shape[-1]) if x.dim() == 1 else x[None]
    return x if x.dim() == 3 else x.view(-1, *x.shape[-2:])


def _check_rows(x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the last dimension must be contiguous: a tensor {list(x.shape)} has strides {x.stride()}")
