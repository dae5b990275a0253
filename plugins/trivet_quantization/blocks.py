"""The integers, scales and offsets of GGUF's blocks, without a step through floats.

Layouts: ``block_q4_0`` and so on in ggml-common.h. Weights of up to four bits stay in four, others are kept in eight.
Scales of the types that have one float16 number per block are taken as they are; those of the K types are products of
a float16 number and an integer of up to eight bits, and are rounded to float16 when they are packed, which changes a
weight by at most 2^-11 of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from trivet.gguf import BLOCK_SIZES, GGMLType
from trivet_kernels.reference.quantized import QuantizedMatrix
from trivet_quantization.formats import Format

# Values, scales and offsets of blocks ``[blocks, bytes]``: ``[blocks, values]`` uint8, ``[blocks, segments]`` float32.
_Read = tuple[Tensor, Tensor, Tensor | None]

_EIGHT = Format(32, bits=8, zero_point=128)
_EIGHT_OFFSETS = Format(32, bits=8, zero_point=128, offsets=True)
_EIGHT_SHORT = Format(16, bits=8, zero_point=128)
_FOUR_OFFSETS = Format(32, bits=4, zero_point=0, offsets=True)

#: what blocks of each type are packed as
FORMATS: Mapping[GGMLType, Format] = MappingProxyType(
    {
        GGMLType.Q4_0: Format(32, bits=4, zero_point=8),
        GGMLType.Q4_1: _FOUR_OFFSETS,
        GGMLType.Q5_0: _EIGHT,
        GGMLType.Q5_1: _EIGHT_OFFSETS,
        GGMLType.Q8_0: _EIGHT,
        GGMLType.Q2_K: Format(16, bits=4, zero_point=0, offsets=True),
        GGMLType.Q3_K: Format(16, bits=4, zero_point=4),
        GGMLType.Q4_K: _FOUR_OFFSETS,
        GGMLType.Q5_K: _EIGHT_OFFSETS,
        GGMLType.Q6_K: _EIGHT_SHORT,
        GGMLType.IQ4_NL: _EIGHT,
        GGMLType.IQ4_XS: _EIGHT,
    }
)


def read_blocks(kind: GGMLType, blocks: Tensor) -> QuantizedMatrix:
    """Rows of blocks ``[rows, bytes]`` uint8 as the matrix that they are."""
    _, width = BLOCK_SIZES[kind]
    form = FORMATS[kind]
    rows = blocks.shape[0]
    values, scale, offset = _READERS[kind](blocks.reshape(-1, width))
    values = values.view(rows, -1)
    return QuantizedMatrix(
        values,
        scale.view(rows, -1),
        None if offset is None else offset.view(rows, -1),
        values.shape[1],
        form.segment,
        form.bits,
        form.zero_point,
    )


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at byte ``start`` of each block, as ``[blocks, 1]`` float32."""
    return blocks[:, start : start + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _nibbles(data: Tensor, group: int) -> Tensor:
    """Every ``group`` bytes hold ``2 * group`` values, the first half of them in the low four bits."""
    runs = data.reshape(data.shape[0], -1, 1, group)
    return torch.cat([runs & 15, runs >> 4], dim=2).flatten(1)


def _pairs(data: Tensor, group: int) -> Tensor:
    """Every ``group`` bytes hold ``4 * group`` values of two bits, the first run in the lowest."""
    runs = data.reshape(data.shape[0], -1, 1, group)
    return torch.cat([(runs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)


def _bits(data: Tensor, group: int) -> Tensor:
    """Every ``group`` bytes hold ``8 * group`` values of one bit."""
    runs = data.reshape(data.shape[0], -1, 1, group)
    return torch.cat([(runs >> shift) & 1 for shift in range(8)], dim=2).flatten(1)


# Byte -> its bits, lowest first.
_OF_BYTE = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).to(torch.uint8)
_IQ4_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_IQ4_STORED = (_IQ4_LEVELS + 128).to(torch.uint8)


def _fifth(data: Tensor) -> Tensor:
    """The high bits of Q5_0 and Q5_1, as ``[blocks, 32]``, 0 or 16."""
    return _OF_BYTE[data.int()].flatten(1) << 4


def _q4_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Read:
    return (_nibbles(blocks[:, 6:], 16) | _fifth(blocks[:, 2:6])) + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Read:
    return (_nibbles(blocks[:, 8:], 16) | _fifth(blocks[:, 4:8])) + 128, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _q2_k(blocks: Tensor) -> _Read:
    scales = blocks[:, :16]
    scale, offset = _half(blocks, 80) * (scales & 15), -_half(blocks, 82) * (scales >> 4)
    return _pairs(blocks[:, 16:80], 32), scale, offset


def _q3_k(blocks: Tensor) -> _Read:
    low_scales, high_scales = blocks[:, 96:104], blocks[:, 104:108]
    low = torch.cat([low_scales & 15, low_scales >> 4], dim=1)
    high = torch.cat([(high_scales >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scale = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    # A set mask bit means that 4 is not subtracted.
    return _pairs(blocks[:, 32:96], 32) | (_bits(blocks[:, :32], 32) << 2), scale, None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> _Read:
    values = _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 32) << 4)
    return values + 128, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> _Read:
    values = _nibbles(blocks[:, :128], 64) | (_pairs(blocks[:, 128:192], 32) << 4)
    scales = blocks[:, 192:208].clone(memory_format=torch.contiguous_format).view(torch.int8)
    return values + (128 - 32), _half(blocks, 208) * scales, None


def _iq4_nl(blocks: Tensor) -> _Read:
    return _IQ4_STORED[_nibbles(blocks[:, 2:], 16).int()], _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> _Read:
    high = blocks[:, 2:4].repeat_interleave(4, dim=1) >> torch.tensor([0, 2, 4, 6] * 2, dtype=torch.uint8)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)
    scale = _half(blocks, 0) * ((low | ((high & 3) << 4)).float() - 32)
    return _IQ4_STORED[_nibbles(blocks[:, 8:], 16).int()], scale, None


_READERS: Mapping[GGMLType, Callable[[Tensor], _Read]] = MappingProxyType(
    {
        GGMLType.Q4_0: _q4_0,
        GGMLType.Q4_1: _q4_1,
        GGMLType.Q5_0: _q5_0,
        GGMLType.Q5_1: _q5_1,
        GGMLType.Q8_0: _q8_0,
        GGMLType.Q2_K: _q2_k,
        GGMLType.Q3_K: _q3_k,
        GGMLType.Q4_K: _q4_k,
        GGMLType.Q5_K: _q5_k,
        GGMLType.Q6_K: _q6_k,
        GGMLType.IQ4_NL: _iq4_nl,
        GGMLType.IQ4_XS: _iq4_xs,
    }
)
