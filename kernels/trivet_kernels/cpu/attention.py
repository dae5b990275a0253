"""Paged attention and the writes to the KV cache, in compiled C."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from trivet_kernels.cpu.types import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = (_P, _P, _P, _I, _I, _P, _I, _I, _P, _I, _I, _P, _I, _F, _F, _I, _P, _P)


class _StepStruct(ctypes.Structure):
    _fields_ = (
        ("query_start", _P),
        ("seq_lens", _P),
        ("block_table", _P),
        ("slot_mapping", _P),
        ("table_stride", _I),
        ("num_rows", _I),
        ("num_tokens", _I),
        ("num_threads", _I),
    )


class _CacheStruct(ctypes.Structure):
    _fields_ = (("cache", _P), ("block", _I), ("token", _I), ("head", _I), ("dim", _I))


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("key", _CacheStruct),
        ("value", _CacheStruct),
        ("block_size", _I),
        ("num_kv_heads", _I),
        ("dtype", _I),
    )


class Step:
    """The rows of a step, for all layers that share a block table; tensors on the CPU, which it keeps alive.

    Args:
        query_start: ``[R + 1]`` integers: where each row's queries begin among the step's tokens.
        seq_lens: ``[R]`` integers: the rows' contexts, their queries included.
        block_table: ``[R, max_blocks]`` integers.
        slot_mapping: ``[T]`` integers ``block * block_size + offset``, where keys and values are written.
    """

    __slots__ = ("_keep", "_struct", "address", "num_tokens")

    def __init__(self, query_start: Tensor, seq_lens: Tensor, block_table: Tensor, slot_mapping: Tensor) -> None:
        self._keep = query_start, seq_lens, block_table, slot_mapping = (
            _dense(query_start, torch.int32),
            _dense(seq_lens, torch.int32),
            _dense(block_table, torch.int32),
            _dense(slot_mapping, torch.int64),
        )
        self.num_tokens = len(slot_mapping)
        self._struct = _StepStruct(
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            slot_mapping.data_ptr(),
            block_table.shape[1],
            len(seq_lens),
            self.num_tokens,
            torch.get_num_threads(),
        )
        self.address = ctypes.addressof(self._struct)


class CachedAttention:
    """Attention over one layer's cache, called once per step.

    A token's result depends on its query and on the keys and values that it sees: neither on the rest of the batch, nor
    on the number of threads, nor on how the context was cut into chunks. Products of bfloat16 are summed in float32.
    Where the processor has instructions for such products, by vectors or matrix tiles, weights are rounded to bfloat16
    before they are multiplied with values, and those that are too small for a float count as zeros.

    Args:
        library: As :func:`trivet_kernels.cpu.build.library` returns it.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` in float32 or bfloat16, heads without gaps.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]`` of the same type.

    Raises:
        ValueError: If the caches are not of these types or shapes.
    """

    def __init__(self, library: ctypes.CDLL, key_cache: Tensor, value_cache: Tensor) -> None:
        if key_cache.dtype not in DTYPES or value_cache.dtype is not key_cache.dtype:
            names = f"{key_cache.dtype} and {value_cache.dtype}"
            raise ValueError(f"keys and values must both be float32 or both be bfloat16, not {names}")
        if key_cache.shape[:3] != value_cache.shape[:3]:
            raise ValueError(f"caches of different shapes: {list(key_cache.shape)} and {list(value_cache.shape)}")
        if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
            raise ValueError("the elements of a head must lie side by side in the cache")
        self.dtype = key_cache.dtype
        self._keep = key_cache, value_cache
        self._v_head_dim = value_cache.shape[3]
        self._struct = _LayerStruct(
            _cache_struct(key_cache),
            _cache_struct(value_cache),
            key_cache.shape[1],
            key_cache.shape[2],
            DTYPES[self.dtype],
        )
        self._address = ctypes.addressof(self._struct)
        self._function = library.trivet_attention
        self._function.restype, self._function.argtypes = _I, _ARGUMENTS

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Step,
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys and values to the cache, then attend.

        Args:
            query: ``[T, num_heads, head_dim]`` in the cache's dtype; like keys and values it may be a view whose heads
                have no gaps.
            key: ``[T, num_kv_heads, head_dim]``.
            value: ``[T, num_kv_heads, v_head_dim]``.
            step: Rows, block table and places of the tokens.
            scale: Factor of the scores.
            window: Tokens that a query sees, itself included, or tokens of a chunk; None: all.
            chunked: Whether queries see what precedes them in their chunk, in place of a window that slides.
            softcap: ``c`` of ``c * tanh(score / c)``; None: none.
            sinks: ``[num_heads]`` logits that take part in the softmax's denominator only; None: none.
            alibi_slopes: ``[num_heads]``: ``slope * d`` is taken off the score of a key ``d`` positions back.

        Returns:
            ``[T, num_heads, v_head_dim]`` in the cache's dtype; zeros for tokens of no row.

        Raises:
            MemoryError: If there is none for the kernel's buffers.
        """
        num_tokens, num_heads, _ = query.shape
        out = query.new_empty((num_tokens, num_heads, self._v_head_dim))
        if window is None:
            window = 0
        elif chunked:
            window = -window
        if sinks is not None:
            sinks = _dense(sinks, torch.float32)
        if alibi_slopes is not None:
            alibi_slopes = _dense(alibi_slopes, torch.float32)
        query, query_token, query_head = _strided(query)
        key, key_token, key_head = _strided(key)
        value, value_token, value_head = _strided(value)
        failed = self._function(
            step.address,
            self._address,
            query.data_ptr(),
            query_token,
            query_head,
            key.data_ptr(),
            key_token,
            key_head,
            value.data_ptr(),
            value_token,
            value_head,
            out.data_ptr(),
            num_heads,
            scale,
            softcap or 0.0,
            window,
            None if sinks is None else sinks.data_ptr(),
            None if alibi_slopes is None else alibi_slopes.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for the buffers of attention over {num_tokens} tokens")
        return out


def _strided(rows: Tensor) -> tuple[Tensor, int, int]:
    """``[T, heads, dim]`` whose heads have no gaps, and the strides between tokens and heads."""
    token, head, element = rows.stride()
    if element != 1 and rows.shape[2] != 1:
        rows = rows.contiguous()
        token, head, _ = rows.stride()
    return rows, token, head


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).contiguous()


def _cache_struct(cache: Tensor) -> Any:
    size = cache.element_size()
    block, token, head, _ = cache.stride()
    return _CacheStruct(cache.data_ptr(), block * size, token * size, head * size, cache.shape[3])
