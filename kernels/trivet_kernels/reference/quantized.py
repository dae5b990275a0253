"""Matrices of few bits: what they stand for, and their products, slowly and obviously."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight ``[out, in]`` in segments of ``segment`` values along a row, each with a scale and perhaps an offset.

    A weight is ``scale * (values - zero_point) + offset``. ``in`` need not be a multiple of ``segment``: ``values`` is
    ``[out, segments * segment]``, and its columns from ``in_features`` on are multiplied with nothing.
    """

    values: Tensor  #: ``[out, segments * segment]`` uint8, each below ``2 ** bits``
    scale: Tensor  #: ``[out, segments]`` float32
    offset: Tensor | None  #: ``[out, segments]`` float32
    in_features: int
    segment: int  #: a multiple of 16
    bits: int  #: 4 or 8
    zero_point: int  #: 128 with eight bits, so that ``values - zero_point`` fits into a signed byte

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        assert self.bits in {4, 8}
        assert self.bits == 4 or self.zero_point == 128
        assert self.segment % 16 == 0
        assert columns == self.scale.shape[1] * self.segment
        assert columns - self.segment < self.in_features <= columns
        assert self.scale.shape[0] == rows
        assert self.offset is None or self.offset.shape == self.scale.shape

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.values.shape[0]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights ``[out, in]`` that this stands for."""
        values = self.values.to(dtype).sub_(self.zero_point).view(*self.scale.shape, self.segment)
        values.mul_(self.scale.to(dtype).unsqueeze(-1))
        if self.offset is not None:
            values.add_(self.offset.to(dtype).unsqueeze(-1))
        weights: Tensor = values.flatten(1)[:, : self.in_features]
        return weights


def quantize_activations(x: Tensor, group: int, bits: int = 8) -> Tensor:
    """``x`` ``[T, in]`` rounded to eight or sixteen bits, as float64.

    In every group of ``group`` values the largest magnitude becomes 127, and ties go to even, as the processor rounds.
    With sixteen bits, what that leaves is rounded again, in steps of one in 254.
    """
    rows, columns = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -columns % group)).view(rows, -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    # A number divided by a tensor would be its reciprocal times the number, which is not the same.
    scaled = groups * torch.where(largest > 0, torch.full_like(largest, 127) / largest, torch.zeros(()))
    rounded = scaled.round().double()
    if bits == 16:
        rounded += ((scaled - scaled.round()) * 254).round().double() / 254
    values: Tensor = (rounded * (largest / 127).double()).view(rows, -1)[:, :columns]
    return values


def quantized_linear(
    x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None, *, act_group: int | None = None, act_bits: int = 8
) -> Tensor:
    """``x`` ``[T, in]`` times the transposed matrix, plus ``bias`` ``[out]``, in float64.

    With ``act_group`` the activations are rounded first (:func:`quantize_activations`), as the integer kernels do."""
    wide = x.double() if act_group is None else quantize_activations(x, act_group, act_bits)
    product = wide @ matrix.dequantized(torch.float64).T
    return product if bias is None else product + bias.double()
