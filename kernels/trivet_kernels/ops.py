"""The small operations of a decoder between its matrix products, and who computes them on which device.

Every implementation gives the same results within rounding; :mod:`trivet_kernels.reference.ops` says what they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Gate = Literal["silu", "gelu_tanh", "gelu"]
"""The activation of a gate: SiLU, or GELU with the approximation by tanh or exactly."""


class Ops(ABC):
    """Operations on activations ``[T, …]`` in float32, bfloat16 or float16, whose rows may be strided views.

    All compute in float32 and round once. ``out`` may be given where a result should go (it may be ``x`` itself); a
    new tensor is made otherwise. None of them waits for the device.
    """

    name: str

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """``x * rsqrt(mean(x²) + eps) * weight`` over the last dimension; ``x`` ``[…, N]``, ``weight`` ``[N]``
        float32. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

    @abstractmethod
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        """``residual += x`` in place, rounded to the residual's type, then the norm of that rounded sum.

        ``x`` and ``residual`` are ``[T, N]``."""

    @abstractmethod
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
        """Rotate queries ``[T, H, D]`` and keys ``[T, Hk, D]`` in place by their positions.

        ``table`` ``[max_positions, R]`` float32 holds, for each position, ``R / 2`` cosines and then ``R / 2`` sines
        (whatever scales them is in it); the first ``R ≤ D`` elements of a head are rotated. Element ``i`` is paired
        with ``i + R / 2``, or with ``interleaved`` element ``2i`` with ``2i + 1``. With weights ``[D]`` float32 every
        head is normalised (:meth:`rms_norm`) first, without rounding in between. ``positions`` is ``[T]`` int64.
        (Su et al., "RoFormer", 2021)."""

    @abstractmethod
    def silu_and_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``silu(gate) * up`` of ``x = [gate, up]`` ``[T, 2N]``; returns ``[T, N]``."""

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, out: Tensor | None = None, *, approximate: bool = True) -> Tensor:
        """``gelu(gate) * up`` of ``x = [gate, up]`` ``[T, 2N]``, by the tanh formula if ``approximate``."""


def ops_for(device: torch.device) -> Ops:
    """The fastest operations there are for a device; the first call on a CPU may compile them."""
    if device.type == "cpu":
        from trivet_kernels.cpu.build import library

        if (native := library()) is not None:
            from trivet_kernels.cpu.ops import NativeOps

            return NativeOps(native)
    elif device.type == "cuda" and find_spec("triton"):
        from trivet_kernels.triton.ops import TritonOps

        return TritonOps()
    from trivet_kernels.reference.ops import ReferenceOps

    return ReferenceOps()
