"""What a model multiplies with, whatever its weights are stored as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class Linear(ABC):
    """A matrix product with a bias or without. ``Quantization.linear`` returns one, and so do the packed and the plain
    layers here."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[T, in_features]``, rows may be strided; returns ``[T, out_features]`` in the type of ``x``."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of memory that its weights take, scales and bias included."""


class PlainLinear(Linear):
    """A product with a matrix in torch's own layout, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keep ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]`` of the same type as they
        are."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        return functional.linear(x, self.weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PackedLinear(Linear):
    """A product with a matrix in the blocked layout of oneDNN's kernels, on the CPU.

    Without it the library brings the matrix into that layout in every call. The layout does not depend on the number
    of rows of the input, nor, in bfloat16, does the result of a row.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a copy of ``weight`` ``[out_features, in_features]``, which is not kept and may be a view of a file.

        ``bias`` ``[out_features]``, of the same type, is kept. See :func:`can_pack` for what is supported.
        """
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features)
        product: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return product

    @property
    def weight_bytes(self) -> int:
        packed: int = torch.ops.mkldnn._nbytes(self._packed)
        return packed + (0 if self.bias is None else self.bias.nbytes)


def can_pack(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Whether :class:`PackedLinear` works for ``dtype`` on ``device``, with this processor and this build of torch."""
    if torch.device(device).type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def make_linear(
    parts: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
) -> Linear:
    """The fastest layer that puts the outputs of ``parts`` side by side.

    Args:
        parts: Matrices ``[out_i, in_features]`` of any type; views of a file are fine. None of them is kept.
        biases: One per part, ``[out_i]`` or None for zeros; None if no part has one.
        dtype: Of the layer's weights and inputs.
        device: Where it computes.
    """
    bias = _joined_bias(parts, biases or [], dtype, device)
    is_packed = can_pack(dtype, device)
    if len(parts) == 1:
        weight = parts[0].to(device=device, dtype=dtype, copy=not is_packed)
    else:
        weight = torch.empty(sum(len(part) for part in parts), parts[0].shape[1], dtype=dtype, device=device)
        row = 0
        for part in parts:
            weight[row : row + len(part)] = part
            row += len(part)
    return PackedLinear(weight, bias) if is_packed else PlainLinear(weight, bias)


def _joined_bias(
    parts: Sequence[Tensor], biases: Sequence[Tensor | None], dtype: torch.dtype, device: str | torch.device
) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(len(part), dtype=dtype, device=device) if bias is None else bias.to(device, dtype, copy=True)
            for part, bias in zip(parts, biases, strict=True)
        ]
    )
