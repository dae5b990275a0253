"""Writes to a paged KV cache.

Caches are ``[num_blocks, block_size, num_kv_heads, head_dim]``. Blocks may lie apart in memory, as in a view of larger
pages; the layout within a block is contiguous.
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


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its place, converting to the cache's dtype.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, v_head_dim]``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, changed in place.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``, changed in place.
        slot_mapping: ``[num_tokens]`` int64 ``block * block_size + offset``, without repetitions.
    """
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        _write(cache, slot_mapping, tokens.to(cache.dtype))


def read_tokens(cache: Tensor, positions: Tensor) -> Tensor:
    """``[n, num_kv_heads, head_dim]`` copies of the tokens at flat ``positions`` ``[n]`` int64."""
    flat = token_view(cache)
    if flat is not None:
        # Rows of one contiguous matrix are copied whole, which is several times faster than element by element.
        return flat.flatten(1).index_select(0, positions).view(-1, *flat.shape[1:])
    block_size = cache.shape[1]
    return cache[positions // block_size, positions % block_size]


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, ``pairs`` ``[n, 2]`` integers (source, destination); all are read before one is written."""
    source, destination = pairs.to(device=cache.device, dtype=torch.int64).unbind(1)
    cache[destination] = cache[source]


def zero_blocks(cache: Tensor, blocks: Tensor) -> None:
    """Fill ``blocks`` ``[n]`` integers with zeros."""
    cache[blocks.to(device=cache.device, dtype=torch.int64)] = 0


def move_tokens(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy single tokens; both ``[n]`` int64 flat positions, all sources are read before anything is written."""
    _write(cache, destination.to(cache.device), read_tokens(cache, source.to(cache.device)))


def _write(cache: Tensor, positions: Tensor, tokens: Tensor) -> None:
    flat = token_view(cache)
    if flat is not None:
        flat.index_copy_(0, positions, tokens)
    else:
        block_size = cache.shape[1]
        cache[positions // block_size, positions % block_size] = tokens
