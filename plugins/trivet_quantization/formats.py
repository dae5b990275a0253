"""What a matrix is packed as, and matrices of floats rounded to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trivet_kernels.reference.quantized import QuantizedMatrix
from trivet_quantization.rounding import affine4, symmetric4, symmetric8

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored; fields as those of :class:`trivet_kernels.reference.quantized.QuantizedMatrix`."""

    segment: int
    bits: int
    zero_point: int
    offsets: bool = False
    wide_scale: bool = False
    factor: float = 1.0  #: of scales and offsets: float16 numbers times it

    @property
    def size_fields(self) -> dict[str, Any]:
        """Those that decide how much memory a matrix takes."""
        return {
            "segment": self.segment,
            "bits": self.bits,
            "offsets": self.offsets,
            "wide_scale": self.wide_scale,
        }


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix that can be had some rows at a time, in one format."""

    name: str
    format: Format
    rows: int
    columns: int
    read: Callable[[int, int], QuantizedMatrix]  #: rows ``[begin, end)``
    release: Callable[[int, int], None] | None = None  #: rows ``[begin, end)`` are not read again


# float16 has 11 bits from 6e-5 on, and scales of weights are often smaller.
_FACTOR = 2.0**-10


def eight_bits(group: int | None, columns: int) -> Format:
    """Symmetric, with a scale per ``group`` values or per row."""
    whole = -(-columns // 16) * 16
    segment = min(group or whole, whole)
    return Format(segment, bits=8, zero_point=128, wide_scale=segment > 64, factor=_FACTOR)


def four_bits(*, offsets: bool) -> Format:
    """Groups of 32 values with a scale, and an offset if wanted."""
    return Format(32, bits=4, zero_point=0 if offsets else 8, offsets=offsets, factor=_FACTOR)


def round_to(form: Format, weight: Tensor) -> QuantizedMatrix:
    """``weight`` ``[rows, columns]`` in another format, rounded to nearest."""
    rounding = symmetric8 if form.bits == 8 else affine4 if form.offsets else symmetric4
    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % form.segment))
    values, scale, offset = rounding(padded.view(len(weight), -1, form.segment))
    return QuantizedMatrix(values.flatten(1), scale, offset, columns, form.segment, form.bits, form.zero_point)
