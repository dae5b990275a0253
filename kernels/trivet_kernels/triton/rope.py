"""Rotary position embeddings of queries and keys in one launch, after the norm of each head where there is one.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton.compat import jit


@jit()
def _rotate(
    heads: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.tensor,
    head_stride: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    eps: tl.tensor,
    interleaved: tl.constexpr,
    norm: tl.constexpr,
    size: tl.constexpr,
    rotated: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    block_heads: tl.constexpr,
) -> None:
    """Rotate ``block_heads`` heads from ``first_head`` on of the token whose heads begin at ``heads + row``."""
    head = first_head + tl.arange(0, block_heads)
    start = heads + row + head.to(tl.int64)[:, None] * head_stride
    pair = tl.arange(0, pairs)
    if interleaved:
        left, right = 2 * pair, 2 * pair + 1
    else:
        left, right = pair, pair + rotated // 2
    there = head[:, None] < num_heads
    inside = there & (pair < rotated // 2)[None, :]
    first = tl.load(start + left[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + right[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm:
        squares = tl.sum(first * first + second * second, 1)
        if size > rotated:
            beyond = rotated + tl.arange(0, rest)
            also = there & (beyond < size)[None, :]
            rest = tl.load(start + beyond[None, :], mask=also, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / size + eps)[:, None]
        within = pair < rotated // 2
        first = first * scale * tl.load(weight + left, mask=within, other=0.0)[None, :].to(tl.float32)
        second = second * scale * tl.load(weight + right, mask=within, other=0.0)[None, :].to(tl.float32)
        if size > rotated:
            factor = tl.load(weight + beyond, mask=beyond < size, other=0.0)[None, :].to(tl.float32)
            tl.store(start + beyond[None, :], rest * scale * factor, mask=also)
    tl.store(start + left[None, :], first * cosine[None, :] - second * sine[None, :], mask=inside)
    tl.store(start + right[None, :], second * cosine[None, :] + first * sine[None, :], mask=inside)


@jit()
def rotary_kernel(
    query: tl.tensor,
    key: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    table_row_stride: tl.tensor,
    num_query_heads: tl.tensor,
    num_key_heads: tl.tensor,
    eps: tl.tensor,
    interleaved: tl.constexpr,
    norm_query: tl.constexpr,
    norm_key: tl.constexpr,
    size: tl.constexpr,
    rotated: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    block_heads: tl.constexpr,
) -> None:
    """A program for each token and ``block_heads`` of its query heads, then of its key heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, pairs)
    angles = table + tl.load(positions + token).to(tl.int64) * table_row_stride
    cosine = tl.load(angles + pair, mask=pair < rotated // 2, other=0.0)
    sine = tl.load(angles + rotated // 2 + pair, mask=pair < rotated // 2, other=0.0)
    query_blocks = tl.cdiv(num_query_heads, block_heads)
    if block < query_blocks:
        _rotate(
            query,
            query_weight,
            token * query_row_stride,
            block * block_heads,
            num_query_heads,
            query_head_stride,
            cosine,
            sine,
            eps,
            interleaved,
            norm_query,
            size,
            rotated,
            pairs,
            rest,
            block_heads,
        )
    else:
        _rotate(
            key,
            key_weight,
            token * key_row_stride,
            (block - query_blocks) * block_heads,
            num_key_heads,
            key_head_stride,
            cosine,
            sine,
            eps,
            interleaved,
            norm_key,
            size,
            rotated,
            pairs,
            rest,
            block_heads,
        )
