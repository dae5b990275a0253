"""Root-mean-square normalisation, alone and after a residual sum: a program for each row.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton.compat import jit


@jit()
def norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    x_outer_stride: tl.tensor,
    x_row_stride: tl.tensor,
    out_outer_stride: tl.tensor,
    out_row_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``out = x * rsqrt(mean(x²) + eps) * weight``; row ``i`` is ``x[i // inner, i % inner]``."""
    row = tl.program_id(0).to(tl.int64)
    outer, row = row // inner, row % inner
    column = tl.arange(0, block)
    inside = column < size
    values = tl.load(x + outer * x_outer_stride + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normal = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps) * scale
    tl.store(out + outer * out_outer_stride + row * out_row_stride + column, normal, mask=inside)


@jit()
def add_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_row_stride: tl.tensor,
    residual_row_stride: tl.tensor,
    out_row_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``residual += x``, rounded, and the norm of what was stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    values = tl.load(x + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    place = residual + row * residual_row_stride + column
    rounded = (tl.load(place, mask=inside, other=0.0).to(tl.float32) + values).to(residual.dtype.element_ty)
    tl.store(place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normal = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps) * scale
    tl.store(out + row * out_row_stride + column, normal, mask=inside)
