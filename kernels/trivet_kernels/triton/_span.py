"""The inner loop of paged attention, which prefills and decodes share."""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton.compat import INTERPRETED, LOG2E, jit, tanh, widen


@jit()
def first_seen(place: tl.tensor, window: tl.tensor, span: tl.constexpr) -> tl.tensor:
    """The first position that a query at ``place`` sees; may be negative. ``span`` is ``full``, ``sliding`` or
    ``chunked``."""
    if span == "sliding":
        return place - window + 1
    if span == "chunked":
        return tl.maximum(place, 0) // window * window
    return place * 0


@jit()
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """``acc + a @ b`` in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit()
def attend_span(  # noqa: C901, PLR0912, PLR0915 - branches are of the compilation, and a kernel's loop is one piece
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    own: tl.tensor,
    place: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    slopes: tl.tensor,
    trunk: tl.tensor,
    tree_mask: tl.tensor,
    tree_depth: tl.tensor,
    tree_size: tl.tensor,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    block_d: tl.constexpr,
    block_v: tl.constexpr,
    block_n: tl.constexpr,
    block_size: tl.constexpr,
    kind: tl.constexpr,
    native: tl.constexpr,
    span: tl.constexpr,
    masked: tl.constexpr,
    softcap: tl.constexpr,
    alibi: tl.constexpr,
    tree: tl.constexpr,
) -> tl.tensor:
    """Attend ``m`` query rows to the keys at positions ``begin … end - 1``, tile by tile.

    The softmax is computed online, with powers of two in place of e (FlashAttention 2: Dao, 2023): ``acc`` ``[m, v]``,
    ``top`` ``[m]`` (the largest score so far, times log2 e) and ``total`` ``[m]`` (the sum of the weights) are carried
    on and returned. Keys are found through ``table``, as in PagedAttention (Kwon et al., 2023); ``keys`` and ``values``
    point to the key head's first element in block 0.

    With ``masked`` keys outside ``low … high - 1`` are not read, and queries see those that they may: up to index
    ``own`` ``[m]`` (-1: none), from :func:`first_seen` of their ``place`` ``[m]`` on. Without, all queries see all keys
    of the span. ``begin`` is a multiple of ``block_n``, and so is ``end`` if not ``masked``.
    """
    offs_n = tl.arange(0, block_n)
    offs_d = tl.arange(0, block_d)
    offs_v = tl.arange(0, block_v)
    one_block: tl.constexpr = block_size % block_n == 0
    if one_block:
        # Tiles lie in one block each, whose entry is valid because some of the tile's keys are wanted.
        blocks = tl.load(table + begin // block_size, mask=begin < end, other=0)
    else:
        position = begin + offs_n
        blocks = tl.load(table + position // block_size, mask=(position >= low) & (position < end), other=0)
    for start in range(begin, end, block_n):
        position = start + offs_n
        readable = (position >= low) & (position < high)
        offset = start % block_size + offs_n if one_block else position % block_size
        key_rows = keys + blocks.to(tl.int64) * key_block_stride + offset * key_token_stride
        value_rows = values + blocks.to(tl.int64) * value_block_stride + offset * value_token_stride
        # Read one tile ahead: a tile's addresses then never wait for the table, and loads of keys can be issued as many
        # tiles ahead as there are stages, in place of sharing the stages with loads that they depend on.
        if one_block:
            blocks = tl.load(table + (start + block_n) // block_size, mask=start + block_n < end, other=0)
        else:
            after = position + block_n
            blocks = tl.load(table + after // block_size, mask=after < end, other=0)

        key_at = key_rows[:, None] + offs_d[None, :]
        value_at = value_rows[:, None] + offs_v[None, :]
        if masked:
            key = tl.load(key_at, mask=readable[:, None] & (offs_d < head_dim)[None, :], other=0)
        elif block_d == head_dim:
            key = tl.load(key_at)
        else:
            key = tl.load(key_at, mask=(offs_d < head_dim)[None, :], other=0)
        key = widen(key, query.dtype, kind, native)
        score = dot(query, tl.trans(key), tl.zeros([query.shape[0], block_n], tl.float32))

        key_place = position
        if tree:
            node = position - trunk
            is_node = (node >= 0) & (position < high)
            depth = tl.load(tree_depth + node, mask=is_node, other=0)
            key_place = tl.where(is_node, trunk + depth - 1, position)
        if softcap or alibi:
            score = score * scale
            if softcap:
                score = cap * tanh(score / cap)
            score = score * LOG2E
            if alibi:
                score += slopes[:, None] * (key_place[None, :] - place[:, None]).to(tl.float32)
            factor = 1.0
        else:
            # Left to the exponent, where it costs nothing: one multiplication and addition in one instruction.
            factor = scale * LOG2E
        if masked:
            seen = (position[None, :] <= own[:, None]) & readable[None, :]
            if span != "full":
                seen = seen & (key_place[None, :] >= first_seen(place, window, span)[:, None])
            if tree:
                own_node = own - trunk
                both = (own_node >= 0)[:, None] & is_node[None, :]
                cell = own_node[:, None] * tree_size + node[None, :]
                seen = seen & (tl.load(tree_mask + cell, mask=both, other=1) != 0)
            score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, 1) * factor)
        base = highest
        if masked:
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        top = highest

        if masked:
            value = tl.load(value_at, mask=readable[:, None] & (offs_v < v_head_dim)[None, :], other=0)
        elif block_v == v_head_dim:
            value = tl.load(value_at)
        else:
            value = tl.load(value_at, mask=(offs_v < v_head_dim)[None, :], other=0)
        value = widen(value, query.dtype, kind, native)
        acc = dot(weight.to(query.dtype), value, acc)
    return acc, top, total
