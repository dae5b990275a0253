"""Mixtures of experts in plain PyTorch, one token after the other: what the kernels are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.moe import StackedExperts


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: StackedExperts) -> Tensor:
    """:func:`trivet_kernels.moe.mixture`, computed in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for place, expert in enumerate(chosen[token].tolist()):
            out[token] += weights[token, place].double() * _expert(x[token], expert, experts)
    return out.to(x.dtype)


def _expert(x: Tensor, number: int, experts: StackedExperts) -> Tensor:
    both = experts.gate_up[number].double() @ x.double()
    if experts.gate_up_bias is not None:
        both += experts.gate_up_bias[number]
    if experts.activation == "clamped":
        gate = both[::2].clamp(max=experts.limit)
        gated = gate * torch.sigmoid(experts.slope * gate) * (both[1::2].clamp(-experts.limit, experts.limit) + 1)
    else:
        gate, up = both.chunk(2)
        if experts.activation == "silu":
            gated = functional.silu(gate) * up
        else:
            gated = functional.gelu(gate, approximate="tanh" if experts.activation == "gelu_tanh" else "none") * up
    result = experts.down[number].double() @ gated
    return result if experts.down_bias is None else result + experts.down_bias[number]
