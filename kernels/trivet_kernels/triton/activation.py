"""Gated activations: ``silu(gate) * up`` and ``gelu(gate) * up``."""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton.compat import jit

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU_ERF = tl.constexpr(2)


@jit()
def logistic(x: tl.tensor) -> tl.tensor:
    """``1 / (1 + e⁻ˣ)``, by an exponential that cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@jit()
def activate(gate: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The activation of a gate in float32."""
    if kind == SILU:
        active = gate * logistic(gate)
    elif kind == GELU_TANH:
        # 0.5 * (1 + tanh(z)) is the logistic function of 2z; z = sqrt(2 / pi) * (g + 0.044715 g³).
        active = gate * logistic(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return active


@jit()
def gated_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_row_stride: tl.tensor,
    out_row_stride: tl.tensor,
    size: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One block of columns of one row: ``out = act(x[:size]) * x[size:]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(x + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row_stride + column, activate(gate, kind) * up, mask=inside)
