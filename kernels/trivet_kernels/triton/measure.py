"""Measure which tiles are fastest on the device at hand."""

from __future__ import annotations

from typing import Any

import torch
import triton

from trivet_kernels.triton.attention import paged_attention
from trivet_kernels.triton.tune import Shape, Tiles, candidates, choose

_CONTEXT = 4096
_DECODES = 32
_WINDOW = 1024


def measured_tiles(shape: Shape, block_size: int, device: torch.device) -> Tiles:
    """The fastest tiles for a prefill of 4096 tokens and 32 decodes over as many. Waits for the device, for about a
    minute; every candidate is compiled first."""
    prefill, decode = (
        _call(shape, block_size, device, rows, queries) for rows, queries in ((1, _CONTEXT), (_DECODES, 1))
    )
    return choose(candidates(shape), lambda tiles: _seconds(prefill, tiles), lambda tiles: _seconds(decode, tiles))


def _call(shape: Shape, block_size: int, device: torch.device, rows: int, queries: int) -> dict[str, Any]:
    """Arguments of a call with random contents."""
    blocks = -(-_CONTEXT // block_size)
    dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
    query = torch.randn(rows * queries, shape.group * shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    # Blocks lie scattered, as they come to in a cache that has served for a while.
    table = (torch.randperm(rows * blocks, device=device) + 1).view(rows, blocks).int()
    key_cache, value_cache = (
        torch.randn(rows * blocks + 1, block_size, shape.num_kv_heads, size, dtype=dtype, device=device).to(kv_dtype)
        for size in (shape.head_dim, shape.v_head_dim)
    )
    return {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "query_start": torch.arange(rows + 1, dtype=torch.int32, device=device) * queries,
        "seq_lens": torch.full((rows,), _CONTEXT, dtype=torch.int32, device=device),
        "block_table": table,
        "max_query_len": queries,
        "max_seq_len": _CONTEXT,
        "scale": shape.head_dim**-0.5,
        "window": _WINDOW if shape.windowed else None,
        "out": torch.empty(*query.shape[:2], shape.v_head_dim, dtype=dtype, device=device),
    }


def _seconds(call: dict[str, Any], tiles: Tiles) -> float:
    """The least time that a call took with these tiles."""
    milliseconds = triton.testing.do_bench(lambda: paged_attention(**call, tiles=tiles), rep=30, return_mode="min")
    return float(milliseconds) / 1e3
