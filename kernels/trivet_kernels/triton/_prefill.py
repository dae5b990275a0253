"""Attention of rows with many queries."""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton._span import attend_span, first_seen
from trivet_kernels.triton.compat import LOG2E, jit


@jit()
def finish(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    heads: tl.tensor,
    valid: tl.tensor,
    sinks: tl.tensor,
    value_scale: tl.tensor,
) -> tl.tensor:
    """What an online softmax comes to: ``acc`` over its denominator, sinks included; zeros where nothing was seen."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(top - base)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - base)
    return acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]


@jit()
def find_row(tile: tl.tensor, query_start: tl.tensor, num_rows: tl.tensor, block_q: tl.constexpr) -> tl.tensor:
    """The row that a tile of queries belongs to, and the tile's number in it.

    Row ``i``'s tiles begin at ``query_start[i] // block_q + i``, which leaves room for all tiles of the rows before it
    and needs no sums over rows: a grid of ``num_tokens // block_q + num_rows`` programs suffices for any lengths.
    """
    first = 0
    last = num_rows
    while last - first > 1:
        middle = (first + last) // 2
        begin = tl.load(query_start + middle) // block_q + middle
        if begin <= tile:
            first = middle
        else:
            last = middle
    return first, tile - (tl.load(query_start + first) // block_q + first)


@jit(
    unspecialized=(
        "num_rows",
        "query_token_stride",
        "table_stride",
        "window",
        "min_queries",
        "tree_size",
        "key_scale_stride",
        "value_scale_stride",
    )
)
def prefill_kernel(  # noqa: PLR0915 - a kernel is one piece
    out: tl.tensor,
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
    num_rows: tl.tensor,
    min_queries: tl.tensor,
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
) -> None:
    """Attend the rows with at least ``min_queries`` queries, ``block_m`` pairs of a query and a head per program.

    Grid: (``num_tokens // block_q + num_rows``, key heads times tiles of ``heads`` of their ``group`` query heads).
    The heads of a group are rows of one tile, so keys are read once for all (Ainslie et al., "GQA", 2023). Tiles of
    keys that every query of the tile sees, most of a long prefill, are attended without masks (as in FlashAttention 2).
    """
    block_q: tl.constexpr = block_m // heads
    head_tiles: tl.constexpr = (group + heads - 1) // heads
    tree: tl.constexpr = tree_mask is not None
    alibi: tl.constexpr = alibi_slopes is not None
    # A causal row's last tiles have the most keys; they begin first so that none of them is left for the end.
    row, tile = find_row(tl.num_programs(0) - 1 - tl.program_id(0), query_start, num_rows, block_q)
    first = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - first
    begin_q = tile * block_q
    if (num_queries < min_queries) | (begin_q >= num_queries):
        return
    seq_len = tl.load(seq_lens + row)
    kv_head = tl.program_id(1) // head_tiles
    offs_m = tl.arange(0, block_m)
    in_group = tl.program_id(1) % head_tiles * heads + offs_m % heads
    head = kv_head * group + in_group
    token = begin_q + offs_m // heads
    valid = (offs_m < block_q * heads) & (token < num_queries) & (in_group < group)

    context = seq_len - num_queries
    own = tl.where(valid, context + token, -1)
    first_own = context + begin_q
    last_own = context + tl.minimum(begin_q + block_q, num_queries) - 1
    place = own
    trunk = seq_len
    first_place = first_own
    if tree:
        trunk = seq_len - tl.load(tree_lens + row)
        tree_mask += row.to(tl.int64) * tree_size * tree_size
        tree_depth += row.to(tl.int64) * tree_size
        is_node = own >= trunk
        depth = tl.load(tree_depth + own - trunk, mask=is_node, other=0)
        place = tl.where(is_node, trunk + depth - 1, own)
        first_place = tl.minimum(first_own, trunk)

    offs_d = tl.arange(0, block_d)
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

    high = tl.maximum(last_own + 1, 0)
    low = tl.maximum(first_seen(first_place, window, span), 0)
    begin = low // block_n * block_n
    # Keys from here on are in every query's window …
    inside = begin
    if span != "full":
        inside = tl.cdiv(tl.maximum(first_seen(last_own, window, span), low), block_n) * block_n
        inside = tl.minimum(inside, tl.cdiv(high, block_n) * block_n)
    # … and keys up to here are no query's future.
    past = first_own + 1
    if tree:
        past = tl.minimum(past, trunk)
    past = tl.maximum(past // block_n * block_n, inside)

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            span_begin, span_end = begin, inside
        elif part == 1:
            span_begin, span_end = inside, past
        else:
            span_begin, span_end = past, high
        if part != 0 or span != "full":
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
                span_begin,
                span_end,
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
                part != 1,
                softcap,
                alibi,
                tree,
            )
    acc = finish(acc, top, total, head, valid, sinks, scale_out)
    offs_v = tl.arange(0, block_v)
    out_at = out + ((first + token).to(tl.int64) * num_heads + head) * v_head_dim
    tl.store(
        out_at[:, None] + offs_v[None, :],
        acc.to(out.dtype.element_ty),
        mask=valid[:, None] & (offs_v < v_head_dim)[None, :],
    )
