"""Writes to a paged KV cache on a GPU, with the results of :mod:`trivet_kernels.reference.cache`.

Caches are ``[num_blocks, block_size, num_kv_heads, head_dim]``; blocks may lie apart, the layout within a block is
contiguous. Nothing is read back from the device, and all can be captured into a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivet_kernels.triton.compat import jit, narrow

_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: elements that a program moves
_PIECE = 2048


@jit(unspecialized=("token_stride", "scale_stride"))
def write_kernel(
    tokens: tl.tensor,
    cache: tl.tensor,
    slot_mapping: tl.tensor,
    scale: tl.tensor,
    factor: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    kind: tl.constexpr,
    most: tl.constexpr,
    piece: tl.constexpr,
) -> None:
    """Write one token's keys or values to its slot, bounded by ``most`` where the cache's type has smaller numbers.

    Grid: (tokens, pieces of ``num_heads * head_dim`` elements).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    offs = tl.program_id(1) * piece + tl.arange(0, piece)
    inside = offs < num_heads * head_dim
    head = offs // head_dim
    source = tokens + token * token_stride + head * head_stride + offs % head_dim
    x = tl.load(source, mask=inside, other=0.0)
    target = cache + slot // block_size * block_stride + slot % block_size * (num_heads * head_dim) + offs
    if scale is not None:
        x = x.to(tl.float32) / tl.load(scale + head * scale_stride, mask=inside, other=1.0).to(tl.float32)
    if factor is not None:
        x = x.to(tl.float32) / factor
    if kind != "none":
        tl.store(target, narrow(x.to(tl.float32), kind), mask=inside)
    else:
        if most is not None:
            x = x.to(tl.float32)
            x = tl.where(x > most, most, tl.where(x < -most, -most, x))
        tl.store(target, x.to(cache.dtype.element_ty), mask=inside)


@jit(unspecialized=("source_outer", "target_outer", "index_stride", "target_index_stride"))
def copy_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_index: tl.tensor,
    target_index: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    index_stride: tl.tensor,
    target_index_stride: tl.tensor,
    source_outer: tl.tensor,
    target_outer: tl.tensor,
    size: tl.constexpr,
    source_inner: tl.constexpr,
    target_inner: tl.constexpr,
    piece: tl.constexpr,
) -> None:
    """Copy rows of ``size`` elements. Grid: (rows, pieces of a row).

    Row ``i`` comes from place ``source_index[i]`` and goes to place ``target_index[i]`` (without an index: ``i``). A
    place ``p`` is at ``p // outer * stride + p % outer * inner``. Without a source zeros are written.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * piece + tl.arange(0, piece)
    inside = offs < size
    to = row
    if target_index is not None:
        to = tl.load(target_index + row * target_index_stride).to(tl.int64)
    target += to // target_outer * target_stride + to % target_outer * target_inner
    if source is None:
        tl.store(target + offs, tl.zeros([piece], target.dtype.element_ty), mask=inside)
    else:
        at = row
        if source_index is not None:
            at = tl.load(source_index + row * index_stride).to(tl.int64)
        source += at // source_outer * source_stride + at % source_outer * source_inner
        tl.store(target + offs, tl.load(source + offs, mask=inside, other=0), mask=inside)


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
        key: ``[num_tokens, num_kv_heads, head_dim]``; tokens and heads may be strided.
        value: ``[num_tokens, num_kv_heads, v_head_dim]``, likewise.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, changed in place.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``, changed in place.
        slot_mapping: ``[num_tokens]`` int64 ``block * block_size + offset``, without repetitions; tokens with a
            negative one (padding) are not written.
        key_scale: A number or ``[num_kv_heads]`` or one-element tensor by which keys are divided first; None: 1.
        value_scale: Likewise for values.
    """
    for tokens, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        _write(tokens, cache, slot_mapping, scale)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, ``pairs`` ``[n, 2]`` integers (source, destination); all are read before one is written."""
    pairs = pairs.to(device=cache.device)
    stored = _words(cache)
    size = stored[0].numel()
    _copy_through(stored, pairs[:, 0], pairs[:, 1], (1, size))


def zero_blocks(cache: Tensor, blocks: Tensor) -> None:
    """Fill ``blocks`` ``[n]`` integers with zeros."""
    stored = _words(cache)
    _copy(None, stored, None, blocks.to(device=cache.device), len(blocks), stored[0].numel())


def move_tokens(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy single tokens; both ``[n]`` int64 flat positions, all sources are read before anything is written."""
    stored = _words(cache)
    layout = stored.shape[1], stored[0, 0].numel()
    _copy_through(stored, source.to(device=cache.device), destination.to(device=cache.device), layout)


def _write(tokens: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor | float | None) -> None:
    num_tokens, num_heads, head_dim = tokens.shape
    if num_tokens == 0:
        return
    if tokens.stride(2) != 1:
        tokens = tokens.contiguous()
    kind = _KINDS.get(cache.dtype, "none")
    stored = cache.view(torch.uint8) if kind != "none" else cache
    is_tensor = isinstance(scale, Tensor)
    wide = tokens.dtype if scale is None else torch.promote_types(tokens.dtype, torch.float32)
    most = torch.finfo(cache.dtype).max if torch.finfo(cache.dtype).max < torch.finfo(wide).max else None
    piece = min(_PIECE, triton.next_power_of_2(num_heads * head_dim))
    write_kernel[(num_tokens, triton.cdiv(num_heads * head_dim, piece))](
        tokens,
        stored,
        slot_mapping,
        scale if is_tensor else None,
        float(scale) if scale is not None and not isinstance(scale, Tensor) else None,
        tokens.stride(0),
        tokens.stride(1),
        stored.stride(0),
        scale.stride(-1) if isinstance(scale, Tensor) and scale.numel() > 1 else 0,
        num_heads,
        head_dim,
        stored.shape[1],
        kind,
        most,
        piece,
        num_warps=4,
    )


def _words(cache: Tensor) -> Tensor:
    """The cache as integers, whose bits are copied whatever they mean."""
    return cache.view(_WORDS[cache.dtype.itemsize])


def _copy_through(stored: Tensor, source: Tensor, destination: Tensor, layout: tuple[int, int]) -> None:
    """Copy places to places through a temporary, so that all are read before one is written."""
    size = layout[1]
    staged = stored.new_empty(len(source), size)
    _copy(stored, staged, source, None, len(source), size, layout)
    _copy(staged, stored, None, destination, len(source), size, layout)


def _copy(
    source: Tensor | None,
    target: Tensor,
    source_index: Tensor | None,
    target_index: Tensor | None,
    rows: int,
    size: int,
    layout: tuple[int, int] = (1, 0),
) -> None:
    """Copy ``rows`` rows of ``size`` elements. Sides with an index are caches, whose places are ``layout[0]`` to a
    block and ``layout[1]`` elements apart there; the others are matrices."""
    if rows == 0:
        return
    flat = (1, 0)
    source_outer, source_inner = layout if source_index is not None else flat
    target_outer, target_inner = layout if target_index is not None else flat
    piece = min(_PIECE, triton.next_power_of_2(size))
    arguments: dict[str, Any] = {
        "source": source,
        "target": target,
        "source_index": source_index,
        "target_index": target_index,
        "source_stride": 0 if source is None else source.stride(0),
        "target_stride": target.stride(0),
        "index_stride": 0 if source_index is None else source_index.stride(0),
        "target_index_stride": 0 if target_index is None else target_index.stride(0),
        "source_outer": source_outer,
        "target_outer": target_outer,
        "size": size,
        "source_inner": source_inner,
        "target_inner": target_inner,
        "piece": piece,
    }
    copy_kernel[(rows, triton.cdiv(size, piece))](**arguments, num_warps=4)
