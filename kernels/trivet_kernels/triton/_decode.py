"""Attention of rows with few queries, whose keys are split over programs, and the reduction of the parts."""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton._prefill import finish
from trivet_kernels.triton._span import attend_span, first_seen
from trivet_kernels.triton.compat import LOG2E, jit


@jit()
def split(
    seq_len: tl.tensor,
    num_queries: tl.tensor,
    window: tl.tensor,
    span: tl.constexpr,
    max_parts: tl.constexpr,
    min_keys: tl.constexpr,
    block_n: tl.constexpr,
) -> tl.tensor:
    """How a row's keys are cut: the first one's position, keys per part, and the number of parts.

    It depends on nothing but the row itself, so that no sum is computed in another order for what else the step holds.
    """
    begin = tl.maximum(first_seen(seq_len - num_queries, window, span), 0) // block_n * block_n
    count = tl.maximum(seq_len - begin, 1)
    parts = tl.maximum(max_parts // num_queries, 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(count, parts), block_n) * block_n, min_keys)
    return begin, size, tl.cdiv(count, size)


@jit(
    unspecialized=(
        "slots",
        "max_queries",
        "q_tiles",
        "query_token_stride",
        "table_stride",
        "window",
        "tree_size",
        "key_scale_stride",
        "value_scale_stride",
    )
)
def decode_kernel(
    out: tl.tensor,
    part_out: tl.tensor,
    part_sum: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    sinks: tl.tensor,
    alibi_slopes: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    tree_lens: tl.tensor,
    tree_mask: tl.tensor,
    tree_depth: tl.tensor,
    slots: tl.tensor,
    max_queries: tl.tensor,
    q_tiles: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_scale_stride: tl.tensor,
    value_scale_stride: tl.tensor,
    tree_size: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    scale_out: tl.tensor,
    cap: tl.tensor,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    block_d: tl.constexpr,
    block_v: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_size: tl.constexpr,
    kind: tl.constexpr,
    native: tl.constexpr,
    span: tl.constexpr,
    softcap: tl.constexpr,
    max_parts: tl.constexpr,
    min_keys: tl.constexpr,
) -> None:
    """Attend the rows with at most ``max_queries`` queries, part by part (FlashDecoding: Dao et al., 2023).

    Grid: (rows times ``q_tiles``, key heads times tiles of ``heads`` query heads, any number of programs that share a
    row's parts). A row of one part is finished here; the others' parts go to ``part_out`` ``[num_rows, num_heads,
    slots, v_head_dim]`` (their own softmax's result) and ``part_sum`` ``[num_rows, num_heads, slots]`` (the base-2
    logarithm of its denominator), for :func:`reduce_kernel`.
    """
    block_q: tl.constexpr = block_m // heads
    head_tiles: tl.constexpr = (group + heads - 1) // heads
    tree: tl.constexpr = tree_mask is not None
    alibi: tl.constexpr = alibi_slopes is not None
    row = tl.program_id(0) // q_tiles
    first = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - first
    begin_q = tl.program_id(0) % q_tiles * block_q
    if (num_queries > max_queries) | (begin_q >= num_queries):
        return
    seq_len = tl.load(seq_lens + row)
    begin, size, parts = split(seq_len, num_queries, window, span, max_parts, min_keys, block_n)
    if tl.program_id(2) >= parts:
        return
    kv_head = tl.program_id(1) // head_tiles
    offs_m = tl.arange(0, block_m)
    in_group = tl.program_id(1) % head_tiles * heads + offs_m % heads
    head = kv_head * group + in_group
    token = begin_q + offs_m // heads
    valid = (offs_m < block_q * heads) & (token < num_queries) & (in_group < group)

    context = seq_len - num_queries
    own = tl.where(valid, context + token, -1)
    place = own
    trunk = seq_len
    if tree:
        trunk = seq_len - tl.load(tree_lens + row)
        tree_mask += row.to(tl.int64) * tree_size * tree_size
        tree_depth += row.to(tl.int64) * tree_size
        is_node = own >= trunk
        depth = tl.load(tree_depth + own - trunk, mask=is_node, other=0)
        place = tl.where(is_node, trunk + depth - 1, own)

    offs_d = tl.arange(0, block_d)
    offs_v = tl.arange(0, block_v)
    rows_at = query + (first + token).to(tl.int64) * query_token_stride + head * query_head_stride
    tile_query = tl.load(
        rows_at[:, None] + offs_d[None, :], mask=valid[:, None] & (offs_d < head_dim)[None, :], other=0.0
    )
    slopes = place.to(tl.float32)
    if alibi:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    if key_scale is not None:
        scale = scale * tl.load(key_scale + kv_head * key_scale_stride).to(tl.float32)
    if value_scale is not None:
        scale_out = scale_out * tl.load(value_scale + kv_head * value_scale_stride).to(tl.float32)
    key_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    block_table += row.to(tl.int64) * table_stride
    low = tl.maximum(first_seen(context, window, span), 0)
    high = tl.maximum(context + tl.minimum(begin_q + block_q, num_queries), 0)

    for part in range(tl.program_id(2), parts, tl.num_programs(2)):
        top = tl.full([block_m], float("-inf"), tl.float32)
        total = tl.zeros([block_m], tl.float32)
        acc = tl.zeros([block_m, block_v], tl.float32)
        acc, top, total = attend_span(
            acc,
            top,
            total,
            tile_query,
            key_cache,
            value_cache,
            block_table,
            key_block_stride,
            key_token_stride,
            value_block_stride,
            value_token_stride,
            begin + part * size,
            tl.minimum(begin + part * size + size, high),
            low,
            high,
            own,
            place,
            window,
            scale,
            cap,
            slopes,
            trunk,
            tree_mask,
            tree_depth,
            tree_size,
            head_dim,
            v_head_dim,
            block_d,
            block_v,
            block_n,
            block_size,
            kind,
            native,
            span,
            True,
            softcap,
            alibi,
            tree,
        )
        if parts == 1:
            result = finish(acc, top, total, head, valid, sinks, scale_out)
            out_at = out + ((first + token).to(tl.int64) * num_heads + head) * v_head_dim
            tl.store(
                out_at[:, None] + offs_v[None, :],
                result.to(out.dtype.element_ty),
                mask=valid[:, None] & (offs_v < v_head_dim)[None, :],
            )
        # Decided when compiling: where no row may have several parts, there is no memory for them to be written to.
        if part_out is not None:  # noqa: SIM102
            if parts != 1:
                slot = (row.to(tl.int64) * num_heads + head) * slots + token * parts + part
                tl.store(
                    part_out + (slot * v_head_dim)[:, None] + offs_v[None, :],
                    finish(acc, top, total, head, valid, None, scale_out),
                    mask=valid[:, None] & (offs_v < v_head_dim)[None, :],
                )
                seen = total != 0.0
                tl.store(part_sum + slot, tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), top), mask=valid)


@jit(unspecialized=("slots", "max_queries", "queries", "window"))
def reduce_kernel(
    out: tl.tensor,
    part_out: tl.tensor,
    part_sum: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    slots: tl.tensor,
    max_queries: tl.tensor,
    queries: tl.tensor,
    window: tl.tensor,
    num_heads: tl.constexpr,
    v_head_dim: tl.constexpr,
    block_v: tl.constexpr,
    block_n: tl.constexpr,
    span: tl.constexpr,
    max_parts: tl.constexpr,
    min_keys: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Add up the parts of every query of the rows that :func:`decode_kernel` cut, ``chunk`` parts at a time.

    Grid: (rows times ``queries``, heads).
    """
    row = tl.program_id(0) // queries
    token = tl.program_id(0) % queries
    head = tl.program_id(1)
    first = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - first
    if (num_queries > max_queries) | (token >= num_queries):
        return
    _, _, parts = split(tl.load(seq_lens + row), num_queries, window, span, max_parts, min_keys, block_n)
    if parts == 1:
        return
    slot = (row.to(tl.int64) * num_heads + head) * slots + token * parts
    offs_p = tl.arange(0, max_parts)
    sums = tl.load(part_sum + slot + offs_p, mask=offs_p < parts, other=float("-inf"))
    top = tl.max(sums, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(sums - top), 0)
    if sinks is not None:
        total += tl.exp2(sink - top)

    offs_v = tl.arange(0, block_v)
    offs_c = tl.arange(0, chunk)
    acc = tl.zeros([block_v], tl.float32)
    for begin in range(0, parts, chunk):
        part = begin + offs_c
        weight = tl.exp2(tl.load(part_sum + slot + part, mask=part < parts, other=float("-inf")) - top)
        piece = tl.load(
            part_out + ((slot + part) * v_head_dim)[:, None] + offs_v[None, :],
            mask=(part < parts)[:, None] & (offs_v < v_head_dim)[None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * piece, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out_at = out + ((first + token).to(tl.int64) * num_heads + head) * v_head_dim
    tl.store(out_at + offs_v, acc.to(out.dtype.element_ty), mask=offs_v < v_head_dim)
