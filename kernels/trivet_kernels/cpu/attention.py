"""Paged attention and the writes to the KV cache, in compiled C."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import torch

from trivet_kernels.cpu.types import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Results of so many layers are allocated at once, as long as they take no more bytes than that: in a small step that is
# much of what a call takes, since the weights that were read since the last one leave nothing of torch's code in the
# processor's cache.
_RESULTS, _RESULT_BYTES = 16, 2 << 20


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


class _RowsStruct(ctypes.Structure):
    _fields_ = (("data", _P), ("token", _I), ("head", _I))


class _InputsStruct(ctypes.Structure):
    _fields_ = (("query", _RowsStruct), ("key", _RowsStruct), ("value", _RowsStruct), ("num_heads", _I))


class _ScoresStruct(ctypes.Structure):
    _fields_ = (("scale", _F), ("softcap", _F), ("window", _I), ("sinks", _P), ("slopes", _P))


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

    Layers often have their queries, keys and values in the same tensors, one after the other: in a small step it
    remembers what it was given last, and takes the same tensors for what lies in the same places.

    Args:
        query_start: ``[R + 1]`` integers: where each row's queries begin among the step's tokens.
        seq_lens: ``[R]`` integers: the rows' contexts, their queries included.
        block_table: ``[R, max_blocks]`` integers.
        slot_mapping: ``[T]`` integers ``block * block_size + offset``, where keys and values are written.
    """

    __slots__ = (
        "_copies", "_dtype", "_inputs", "_keep", "_key", "_query", "_result", "_results", "_struct", "_value",
        "address", "inputs", "num_tokens",
    )  # fmt: skip

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
        self._query: Tensor | None = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._result: tuple[torch.dtype | None, int, int] | None = None
        self._results: list[Tensor] = []

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> torch.dtype | None:
        """Have them ready for the kernel; returns their type, None if they are of several."""
        if query is self._query and key is self._key and value is self._value:
            return self._dtype
        given = query, key, value
        strided = [_strided(rows) for rows in given]
        self._inputs = _InputsStruct(*map(_rows_struct, strided), query.shape[1])
        self.inputs = ctypes.addressof(self._inputs)
        self._dtype = query.dtype if query.dtype is key.dtype is value.dtype else None
        # Copies are not what the next layer writes to, and what a long step would leave here takes much memory.
        self._copies = [copy for copy, rows in zip(strided, given, strict=True) if copy is not rows]
        stays = not self._copies and query.nbytes <= _RESULT_BYTES
        self._query, self._key, self._value = given if stays else (None, None, None)
        return self._dtype

    def result(self, query: Tensor, v_head_dim: int) -> Tensor:
        """``[T, num_heads, v_head_dim]`` for ``query``, which was taken, holding anything; another one each time."""
        kind = self._dtype, self._inputs.num_heads, v_head_dim
        if kind != self._result or not self._results:
            self._result = kind
            shape = *query.shape[:2], v_head_dim
            count = min(_RESULTS, _RESULT_BYTES // max(math.prod(shape) * query.element_size(), 1)) or 1
            self._results = list(query.new_empty((count, *shape)).unbind())
        return self._results.pop()


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
        self._scores = _ScoresStruct()
        self._scores_address = ctypes.addressof(self._scores)
        self._scored: tuple[float, int | None, bool, float | None] | None = None
        self._function = library.trivet_attention
        self._function.restype, self._function.argtypes = _I, (_P, _P, _P, _P, _P)

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
            ValueError: If queries, keys and values are not of the cache's dtype.
            MemoryError: If there is none for the kernel's buffers.
        """
        if step.take(query, key, value) is not self.dtype:
            names = ", ".join(str(given.dtype) for given in (query, key, value))
            raise ValueError(f"queries, keys and values must be of the cache's type, {self.dtype}, not {names}")
        scored = scale, window, chunked, softcap
        if scored != self._scored or sinks is not None or alibi_slopes is not None:
            sinks = None if sinks is None else _dense(sinks, torch.float32)
            alibi_slopes = None if alibi_slopes is None else _dense(alibi_slopes, torch.float32)
            self._scores.scale, self._scores.softcap = scale, softcap or 0.0
            self._scores.window = 0 if window is None else -window if chunked else window
            self._scores.sinks = None if sinks is None else sinks.data_ptr()
            self._scores.slopes = None if alibi_slopes is None else alibi_slopes.data_ptr()
            self._scored = scored if sinks is None and alibi_slopes is None else None
        out = step.result(query, self._v_head_dim)
        if self._function(step.address, self._address, step.inputs, self._scores_address, out.data_ptr()):
            raise MemoryError(f"no memory for the buffers of attention over {len(query)} tokens")
        return out


def _strided(rows: Tensor) -> Tensor:
    """``[T, heads, dim]`` whose heads have no gaps."""
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


def _rows_struct(rows: Tensor) -> Any:
    token, head, _ = rows.stride()
    return _RowsStruct(rows.data_ptr(), token, head)


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Asking takes a fraction of the time of operations that change nothing.
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _cache_struct(cache: Tensor) -> Any:
    size = cache.element_size()
    block, token, head, _ = cache.stride()
    return _CacheStruct(cache.data_ptr(), block * size, token * size, head * size, cache.shape[3])
