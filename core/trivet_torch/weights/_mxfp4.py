"""MXFP4: 32 numbers of four bits, two to a byte, share a scale, a power of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: numbers that share a scale
GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor((*_POSITIVE, *(-number for number in _POSITIVE)))
# Of every byte: its low half comes first.
_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=1)
_BIAS = 127


def widened(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``[rows, groups * 32]`` numbers in ``dtype``; bfloat16 holds them exactly.

    Args:
        blocks: ``[rows, groups * 16]`` uint8.
        scales: ``[rows, groups]`` uint8: exponents of two, plus 127.
        dtype: Of what is returned.
    """
    rows, groups = scales.shape
    exponents = scales.int() - _BIAS
    factors = torch.ldexp(torch.ones(exponents.shape), exponents)
    numbers = _PAIRS.index_select(0, blocks.flatten().int()).view(rows, groups, GROUP)
    return (numbers * factors[:, :, None]).to(dtype).view(rows, groups * GROUP)
