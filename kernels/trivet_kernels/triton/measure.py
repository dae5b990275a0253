"""Measure which tiles are fastest on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from trivet_kernels.triton.attention import paged_attention
from trivet_kernels.triton.tune import Shape, Tiles, candidates, choose

_CONTEXT = 4096
_DECODES = 32
_WINDOW = 1024
#: sizes of the cache that the data of calls in turn comes to, so that little of it is found there again
_CACHES = 8
_MOST_COPIES = 32
#: seconds of work in a recording, and how often it is replayed
_WORK, _REPLAYS = 4e-3, 9
_MOST_CALLS = 200


def measured_tiles(shape: Shape, block_size: int, device: torch.device, *, limit: float = 120.0) -> Tiles:
    """The fastest tiles for a prefill of 4096 tokens and 32 decodes over as many. Waits for the device, for a minute or
    so: each candidate is compiled first. After ``limit`` seconds the best so far is taken."""
    prefill, decode = measured_calls(shape, block_size, device)

    def seconds(call: dict[str, Any], tiles: Tiles) -> float:
        return graph_seconds([lambda: paged_attention(**call, tiles=tiles)])

    # One copy will do: the decodes' keys are far more than a cache holds, and a prefill does not wait for memory.
    return choose(
        candidates(shape),
        lambda tiles: seconds(prefill, tiles),
        lambda tiles: seconds(decode, tiles),
        limit=limit,
    )


def measured_calls(shape: Shape, block_size: int, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of ``paged_attention`` for what is measured: a prefill, and decodes."""
    prefill, decode = (
        _call(shape, block_size, device, rows, queries) for rows, queries in ((1, _CONTEXT), (_DECODES, 1))
    )
    return prefill, decode


def copies_for(num_bytes: int, device: torch.device) -> int:
    """How many copies of data of ``num_bytes`` :func:`graph_seconds` should be given calls over."""
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_COPIES, max(1, -(-_CACHES * cache // max(num_bytes, 1))))


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of a call on the current device, without the launches of its kernels: they are recorded into a
    graph, in turn and several times over, and replayed.

    ``calls`` do the same on copies of the data, so that none finds its own in the cache. They must be fit for being
    recorded; each is run once before, which compiles what it needs.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())

    def timed(work: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        ended.synchronize()
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1e3

    def in_turn() -> None:
        for call in calls:
            call()

    with torch.cuda.stream(stream):
        in_turn()
        estimate = timed(in_turn)
        rounds = max(1, min(int(_WORK / max(estimate, 1e-9)), _MOST_CALLS // len(calls)))
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: only this thread's calls are held to what graphs allow.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(rounds):
                in_turn()
        graph.replay()
        return median(timed(graph.replay) for _ in range(_REPLAYS)) / (rounds * len(calls))


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
