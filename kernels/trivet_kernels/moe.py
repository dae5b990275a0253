"""Mixtures of experts whose matrices lie in one tensor, in the best version that there is for where they are."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trivet_kernels.ops import Gate


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """``E`` experts ``down(act(gate(x)) * up(x))`` from ``H`` to ``H`` elements by way of ``N``.

    With the activation ``clamped`` it is ``gate * sigmoid(slope * gate) * (up + 1)``, with ``gate`` at most ``limit``
    and ``up`` within ``±limit``, and the rows of gate and up take turns; otherwise all of gate come before those of up.
    """

    gate_up: Tensor  #: [E, 2N, H]
    down: Tensor  #: [E, H, N]
    activation: Gate | Literal["clamped"]
    gate_up_bias: Tensor | None = None  #: [E, 2N]
    down_bias: Tensor | None = None  #: [E, H]
    slope: float = 0.0
    limit: float = 0.0

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take."""
        tensors = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def serves(device: torch.device) -> bool:
    """Whether :func:`mixture` computes on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: StackedExperts) -> Tensor:
    """The weighted sum of what each token's experts make of it. Nothing waits for the device.

    Args:
        x: ``[T, H]`` in the type of the experts; a row's elements are contiguous.
        chosen: ``[T, top_k]`` int64 numbers of experts, none twice in a row.
        weights: ``[T, top_k]`` float32, contiguous as ``chosen`` is.
        experts: Their matrices, contiguous and on the device of ``x``.

    Returns:
        ``[T, H]``. What an expert makes of a token is rounded once after its activation and once in the end, the sum
        is in float32 in the order of ``chosen``; a token's result does not depend on its neighbours.
    """
    from trivet_kernels.triton.moe import mixture as fused

    return fused(x, chosen, weights, experts)
