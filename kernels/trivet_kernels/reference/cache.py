"""Writes to a paged KV cache, and reads of single tokens.

Caches are ``[num_blocks, block_size, num_kv_heads, head_dim]``. Blocks may lie apart in memory, as in a view of larger
pages; the layout within a block is contiguous.

A cache may be of a narrower type than the keys and values, down to ``float8_e4m3fn`` (largest number 448, 3 bits behind
the point) and ``float8_e5m2`` (57,344, 2 bits). What is too large for it is stored as its largest number, and what a
scale is given for is stored divided by it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_view(cache: Tensor) -> Tensor | None:
    """``[num_blocks * block_size, num_kv_heads, head_dim]`` view of a cache, or None when its blocks lie apart."""
    num_blocks, block_size, heads, dim = cache.shape
    if not cache[0].is_contiguous() or (num_blocks > 1 and cache.stride(0) != block_size * heads * dim):
        return None
    return cache.as_strided((num_blocks * block_size, heads, dim), (heads * dim, dim, 1))


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
) -> None:
    """Write each token's key and value to its place, converting to the cache's dtype.

    Numbers beyond the largest finite one of a narrower cache are stored as that one, NaN stays NaN.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, v_head_dim]``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, changed in place.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``, changed in place.
        slot_mapping: ``[num_tokens]`` int64 ``block * block_size + offset``, without repetitions.
        key_scale: A number or ``[num_kv_heads]`` by which keys are divided first; None: 1.
        value_scale: Likewise for values.
    """
    for tokens, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        _write(cache, slot_mapping, _narrowed(tokens, cache.dtype, scale))


def read_tokens(cache: Tensor, positions: Tensor) -> Tensor:
    """``[n, num_kv_heads, head_dim]`` copies of the tokens at flat ``positions`` ``[n]`` int64, as they are stored."""
    stored = _raw(cache)
    flat, block_size = token_view(stored), cache.shape[1]
    if flat is not None:
        # Rows of one contiguous matrix are copied whole, which is several times faster than element by element.
        tokens = flat.flatten(1).index_select(0, positions).view(-1, *flat.shape[1:])
    else:
        tokens = stored[positions // block_size, positions % block_size]
    return tokens.view(cache.dtype)


def widened(tokens: Tensor, dtype: torch.dtype, scale: Tensor | float | None = None) -> Tensor:
    """Stored ``tokens`` ``[n, num_kv_heads, head_dim]`` as attention computes with them: times ``scale`` (a number or
    ``[num_kv_heads]``; None: 1), in ``dtype``."""
    if scale is None:
        return tokens.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (tokens.to(wide) * _per_head(scale, wide)).to(dtype)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, ``pairs`` ``[n, 2]`` integers (source, destination); all are read before one is written."""
    source, destination = pairs.to(device=cache.device, dtype=torch.int64).unbind(1)
    stored = _raw(cache)
    stored[destination] = stored[source]


def zero_blocks(cache: Tensor, blocks: Tensor) -> None:
    """Fill ``blocks`` ``[n]`` integers with zeros."""
    _raw(cache)[blocks.to(device=cache.device, dtype=torch.int64)] = 0


def move_tokens(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy single tokens; both ``[n]`` int64 flat positions, all sources are read before anything is written."""
    _write(cache, destination.to(cache.device), read_tokens(cache, source.to(cache.device)))


def _narrowed(tokens: Tensor, dtype: torch.dtype, scale: Tensor | float | None) -> Tensor:
    """``tokens`` divided by ``scale``, as a cache of ``dtype`` holds them."""
    wide = torch.promote_types(tokens.dtype, torch.float32)
    if scale is not None:
        tokens = tokens.to(wide) / _per_head(scale, wide)
    most = torch.finfo(dtype).max
    if most < torch.finfo(tokens.dtype).max:
        # What a conversion makes of larger numbers (infinity, NaN, the largest) depends on the type and the device. In
        # bfloat16 float16's largest number would be rounded up.
        tokens = tokens.to(wide).clamp(-most, most)
    return tokens.to(dtype)


def _per_head(scale: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    return scale.to(dtype).reshape(-1, 1) if isinstance(scale, Tensor) else scale


def _raw(cache: Tensor) -> Tensor:
    """The cache as torch can index it: 8-bit floats as bytes, since not every operation knows them on every device."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _write(cache: Tensor, positions: Tensor, tokens: Tensor) -> None:
    stored, tokens = _raw(cache), _raw(tokens)
    flat, block_size = token_view(stored), cache.shape[1]
    if flat is not None:
        flat.index_copy_(0, positions, tokens)
    else:
        stored[positions // block_size, positions % block_size] = tokens
