"""Dequantisation of GGUF tensors with vectorised torch operations.

Formats and formulas: ggml's block layouts (``block_q4_0`` and so on, ggml-common.h) and their reference dequantisation
(ggml-quants.c). Products are formed in the reference's order, so float32 results are equal bit for bit.

A tensor is worked on in chunks that fit into the processor's cache; bit fields are unpacked eight bytes at a time, in
64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trivet.errors import ModelLoadError
from trivet.gguf import BLOCK_SIZES, GGMLType

if TYPE_CHECKING:
    import numpy as np

    from trivet.gguf import GGUFFile

# Elements per chunk: 1 MiB in float32, which stays in the cache from the first operation to the last.
_CHUNK_ELEMENTS = 1 << 18
# Elements per job of a thread.
_JOB_ELEMENTS = 1 << 21
# Beyond this many threads the interpreter's lock, held between operations on a chunk, is the limit.
_MAX_THREADS = 8

_PLAIN: Mapping[GGMLType, torch.dtype] = MappingProxyType(
    {
        GGMLType.F32: torch.float32,
        GGMLType.F16: torch.float16,
        GGMLType.BF16: torch.bfloat16,
        GGMLType.F64: torch.float64,
        GGMLType.I8: torch.int8,
        GGMLType.I16: torch.int16,
        GGMLType.I32: torch.int32,
        GGMLType.I64: torch.int64,
    }
)


def _repeated(byte: int) -> int:
    """The non-negative 64-bit word whose eight bytes are all ``byte`` (below 128)."""
    return byte * 0x0101_0101_0101_0101


def _packed(data: Tensor) -> Tensor:
    """A contiguous copy; ``contiguous()`` would leave a single row where it is, perhaps unaligned for a wider type."""
    return data.clone(memory_format=torch.contiguous_format)


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """``count`` float16 numbers of each block, as ``[num_blocks, count]`` float32."""
    return _packed(blocks[:, start : start + 2 * count]).view(torch.float16).float()


def _bit_fields(data: Tensor, bits: int, group: int, shift: int = 0) -> Tensor:
    """Unpack fields of ``bits`` bits from ``[num_blocks, num_bytes]`` uint8.

    Every ``group`` bytes hold ``8 / bits`` runs of ``group`` values, the first run in the lowest bits. Each value is
    shifted left by ``shift``. Returns ``[num_blocks, num_bytes * 8 / bits]`` uint8.
    """
    num_blocks, num_bytes = data.shape
    words = _packed(data).view(torch.int64).view(num_blocks, num_bytes // group, group // 8)
    mask = _repeated((1 << bits) - 1)
    fields = [((words >> position) & mask) << shift for position in range(0, 8, bits)]
    return torch.stack(fields, dim=2).view(num_blocks, -1).view(torch.uint8)


def _signed(values: Tensor, offset: int) -> Tensor:
    """``values - offset`` as float32, for uint8 ``values`` that are changed in place."""
    return values.view(torch.int8).sub_(offset).float()


# Byte -> its eight bits, lowest first, each moved to bit 4 of a byte of its own; read as one 64-bit word.
_HIGH_BITS = (
    ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).mul(16).to(torch.uint8).view(torch.int64).view(256)
)
# The non-linear levels of IQ4_NL and IQ4_XS.
_IQ4_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).float()


def _fifth_bits(data: Tensor) -> Tensor:
    """The high bits of Q5_0 and Q5_1: ``[num_blocks, 4]`` packed uint8 -> ``[num_blocks, 32]`` uint8, 0 or 16."""
    words = _HIGH_BITS.index_select(0, data.reshape(-1).int())
    return words.view(torch.uint8).view(data.shape[0], 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _signed(_bit_fields(blocks[:, 2:], 4, 16), 8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _bit_fields(blocks[:, 4:], 4, 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _bit_fields(blocks[:, 6:], 4, 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return _signed(values, 16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _bit_fields(blocks[:, 8:], 4, 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return values.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return _packed(blocks[:, 2:]).view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    num_blocks = blocks.shape[0]
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    minimum = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    values = _bit_fields(blocks[:, 16:80], 2, 32).float().view(num_blocks, 16, 16)
    return values.mul_(scale).sub_(minimum).view(num_blocks, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    num_blocks = blocks.shape[0]
    low_scales, high_scales = blocks[:, 96:104], blocks[:, 104:108]
    low = torch.cat([low_scales & 15, low_scales >> 4], dim=1)
    high = torch.cat([(high_scales >> position) & 3 for position in (0, 2, 4, 6)], dim=1)
    scale = _half(blocks, 108) * _signed(low | (high << 4), 32)
    # A set mask bit means that 4 is *not* subtracted.
    values = _bit_fields(blocks[:, 32:96], 2, 32).bitwise_or_(_bit_fields(blocks[:, :32], 1, 32, shift=2))
    return _signed(values, 4).view(num_blocks, 16, 16).mul_(scale.unsqueeze(-1)).view(num_blocks, 256)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of Q4_K and Q5_K, times their float16 factors: two ``[num_blocks, 8, 1]``."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return (_half(blocks, 0) * scales.float()).unsqueeze(-1), (_half(blocks, 2) * minima.float()).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    values = _bit_fields(blocks[:, 16:], 4, 32).float().view(-1, 8, 32)
    return values.mul_(scale).sub_(minimum).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    values = _bit_fields(blocks[:, 48:], 4, 32).bitwise_or_(_bit_fields(blocks[:, 16:48], 1, 32, shift=4))
    return values.float().view(-1, 8, 32).mul_(scale).sub_(minimum).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    values = _bit_fields(blocks[:, :128], 4, 64).bitwise_or_(_bit_fields(blocks[:, 128:192], 2, 32, shift=4))
    scale = _half(blocks, 208) * _packed(blocks[:, 192:208]).view(torch.int8).float()
    return _signed(values, 32).view(-1, 16, 16).mul_(scale.unsqueeze(-1)).view(-1, 256)


def _iq4_nl(blocks: Tensor) -> Tensor:
    levels = _IQ4_LEVELS[_bit_fields(blocks[:, 2:], 4, 16).int()]
    return levels.mul_(_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    num_blocks = blocks.shape[0]
    high = blocks[:, 2:4].repeat_interleave(4, dim=1) >> torch.tensor([0, 2, 4, 6] * 2, dtype=torch.uint8)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).view(num_blocks, 8)
    scale = _half(blocks, 0) * _signed(low | ((high & 3) << 4), 32)
    levels = _IQ4_LEVELS[_bit_fields(blocks[:, 8:], 4, 16).int()].view(num_blocks, 8, 32)
    return levels.mul_(scale.unsqueeze(-1)).view(num_blocks, 256)


# Type -> function from blocks ``[num_blocks, bytes_per_block]`` uint8 to values ``[num_blocks, block_size]`` float32.
_BLOCKS: Mapping[GGMLType, Callable[[Tensor], Tensor]] = MappingProxyType(
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

SUPPORTED_TYPES: frozenset[GGMLType] = frozenset({*_PLAIN, *_BLOCKS})


def dequantize_into(out: Tensor, raw: np.ndarray[Any, np.dtype[np.uint8]], ggml_type: GGMLType) -> None:
    """Write the values of ``raw`` into ``out``, row by row, rounded to its dtype.

    Args:
        out: Tensor of any shape on any device; it may be a slice of a larger tensor. Overwritten.
        raw: The tensor's bytes as the file has them, ``[nbytes]`` uint8.
        ggml_type: One of :data:`SUPPORTED_TYPES`.

    Peak extra memory is a few MiB, whatever the size of the tensor; a view with a permuted order costs one copy of it.
    """
    if not out.is_contiguous():
        _scatter(out, raw, ggml_type)
        return
    block_elements, block_bytes = BLOCK_SIZES[ggml_type]
    flat = out.detach().view(-1)
    step = _CHUNK_ELEMENTS // block_elements
    for start in range(0, raw.size // block_bytes, step):
        source = raw[start * block_bytes : (start + step) * block_bytes]
        # The copy out of the mapped file aligns the bytes; mapped pages are read-only, which torch cannot express.
        chunk = torch.empty(source.size, dtype=torch.uint8)
        chunk.numpy()[:] = source
        if ggml_type in _PLAIN:
            values = chunk.view(_PLAIN[ggml_type])
        else:
            values = _BLOCKS[ggml_type](chunk.view(-1, block_bytes)).view(-1)
        begin = start * block_elements
        flat[begin : begin + values.numel()].copy_(values)


def _scatter(out: Tensor, raw: np.ndarray[Any, np.dtype[np.uint8]], ggml_type: GGMLType) -> None:
    """Fill a view that is not contiguous: through its contiguous parts if it has them, else by way of a copy."""
    if out[0].is_contiguous():
        share = raw.size // out.shape[0]
        for index, part in enumerate(out):
            dequantize_into(part, raw[index * share : (index + 1) * share], ggml_type)
        return
    values = torch.empty(out.shape, dtype=out.dtype)
    dequantize_into(values, raw, ggml_type)
    out.copy_(values)


def dequantize(file: GGUFFile, name: str, dtype: torch.dtype) -> Tensor:
    """The tensor ``name`` of ``file`` as a new CPU tensor of its shape, rounded to ``dtype``.

    Raises:
        ModelLoadError: The type of the tensor is not supported; names tensor and type.
    """
    check_type(file, name)
    info = file.tensors[name]
    out = torch.empty(prod(info.shape), dtype=dtype)
    dequantize_into(out, file.raw(name), info.ggml_type)
    return out.view(info.shape)


def jobs_for(
    out: Tensor, raw: np.ndarray[Any, np.dtype[np.uint8]], ggml_type: GGMLType
) -> Iterator[Callable[[], None]]:
    """Independent parts of ``dequantize_into(out, raw, ggml_type)``, for :func:`run_jobs`."""
    if not out.is_contiguous():
        yield partial(dequantize_into, out, raw, ggml_type)
        return
    block_elements, block_bytes = BLOCK_SIZES[ggml_type]
    flat = out.detach().view(-1)
    step = _JOB_ELEMENTS // block_elements
    for start in range(0, raw.size // block_bytes, step):
        part = flat[start * block_elements : (start + step) * block_elements]
        yield partial(dequantize_into, part, raw[start * block_bytes : (start + step) * block_bytes], ggml_type)


def run_jobs(jobs: Iterable[Callable[[], None]]) -> None:
    """Run ``jobs`` on as many threads as torch uses (at most 8), each job's operations on one thread.

    Splitting the work by jobs instead of splitting every operation saves the meeting of all threads after each of
    thousands of short operations, which takes many times longer than the work itself where processors are shared.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        for job in jobs:
            job()
        return
    try:
        workers = min(num_threads, _MAX_THREADS)
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(_call, jobs):
                pass
    finally:
        # The setting is per thread, but it is also what threads started later begin with.
        torch.set_num_threads(num_threads)


def _call(job: Callable[[], None]) -> None:
    job()


def check_type(file: GGUFFile, name: str) -> None:
    """Raise :class:`ModelLoadError`, naming tensor and type, if the type of tensor ``name`` is not supported."""
    kind = file.tensors[name].ggml_type
    if kind not in SUPPORTED_TYPES:
        known = ", ".join(member.name for member in GGMLType if member in SUPPORTED_TYPES)
        raise ModelLoadError(
            f"{file.path}: tensor {name!r} has the type {kind.name}, which cannot be dequantised; "
            f"use a file of another quantisation (supported: {known})"
        )
