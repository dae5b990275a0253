"""Paged attention for a mixed batch of prefill chunks, decodes and drafts under verification, on a GPU.

Two kernels share the work. Rows with many queries are attended tile by tile
(:func:`trivet_kernels.triton._prefill.prefill_kernel`); the keys of rows with few queries are split over programs and
the parts added up (:func:`trivet_kernels.triton._decode.decode_kernel`). Which of them serves a row, and in which order
its sums are computed, depends on the row and on :class:`trivet_kernels.triton.tune.Tiles`, not on its batch mates.

Nothing is read back from the device. What the host knows of lengths are bounds, from which grids are made: a call that
was captured into a graph may be replayed with other contents of its tensors, as long as they keep within the bounds.

Sources: Dao, "FlashAttention-2", 2023 (tiles, online softmax); Dao et al., "Flash-Decoding", 2023 (split keys); Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023 (block tables).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trivet_kernels.triton._decode import decode_kernel, reduce_kernel
from trivet_kernels.triton._prefill import prefill_kernel
from trivet_kernels.triton.compat import architecture, converts_e4m3
from trivet_kernels.triton.tune import Shape, Tiles, default_tiles

MAX_HEAD_DIM = 256
_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
#: parts whose sum is computed at once
_CHUNK = 16


class Tree(NamedTuple):
    """Trees of drafts at the ends of rows, as the kernels take them; see :func:`plan_tree`."""

    lens: Tensor  #: [R] int32
    mask: Tensor  #: [R, max_tree, max_tree] uint8
    depth: Tensor  #: [R, max_tree] int32: nodes that a node sees, itself included


def plan_tree(tree_lens: Tensor, tree_mask: Tensor) -> Tree:
    """What all layers need of a step's trees: ``tree_lens`` ``[R]`` integers, ``tree_mask`` ``[R, n, n]`` bool."""
    mask = tree_mask.contiguous()
    return Tree(tree_lens.to(torch.int32), mask.view(torch.uint8), mask.sum(2, dtype=torch.int32))


def shape_of(query: Tensor, key_cache: Tensor, value_cache: Tensor, window: int | None = None) -> Shape:
    """The class of shapes that a layer's calls are of, by which :class:`Tiles` are chosen."""
    return Shape(
        head_dim=query.shape[2],
        v_head_dim=value_cache.shape[3],
        num_kv_heads=key_cache.shape[2],
        group=query.shape[1] // key_cache.shape[2],
        dtype=str(query.dtype).removeprefix("torch."),
        kv_dtype=str(key_cache.dtype).removeprefix("torch."),
        windowed=window is not None,
        arch=architecture(query.device),
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    tree: Tree | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend all rows of a step, in one layer whose keys and values have been written to the cache.

    Row ``i``'s queries are ``query[query_start[i]:query_start[i + 1]]`` and sit at the end of its context of
    ``seq_lens[i]`` tokens. A query at position ``p`` sees keys at ``max(0, p - window + 1) … p``, or if ``chunked``
    those at ``p // window * window … p``. Sums are float32. Table entries that no query needs are not read.

    Args:
        query: ``[num_tokens, num_heads, head_dim]`` float32, bfloat16 or float16; heads ``g * num_heads / num_kv_heads
            …`` share key head ``g``. Tokens and heads may be strided.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, also of ``float8_e4m3fn`` or ``float8_e5m2``.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``, of the same type.
        query_start: ``[R + 1]`` int32, ascending; ``query_start[R]`` may be less than ``num_tokens``.
        seq_lens: ``[R]`` int32.
        block_table: ``[R, max_blocks]`` int32.
        max_query_len: No row has more queries.
        max_seq_len: No row has a longer context.
        scale: Positive factor of the scores.
        window: Tokens that a query sees, itself included, or tokens of a chunk; None: all.
        chunked: Whether queries see what precedes them in their chunk, in place of a window that slides.
        softcap: ``c`` of ``c * tanh(score / c)``, applied before masks; None: none.
        sinks: ``[num_heads]`` logits that take part in the softmax's denominator only; None: none.
        alibi_slopes: ``[num_heads]``: a key ``d`` positions before the query gets ``-slope * d`` added to its score.
        key_scale: A number or ``[num_kv_heads]`` or one-element tensor by which stored keys are multiplied; None: 1.
        value_scale: Likewise for values.
        tree: From :func:`plan_tree`, of a batch whose rows end in trees of drafts.
        tiles: What to launch; None: the defaults for the shape.
        out: ``[num_tokens, num_heads, v_head_dim]`` contiguous, to be filled; None: a new one.

    Returns:
        ``[num_tokens, num_heads, v_head_dim]`` in the query's dtype. Tokens of no row are left as they are in ``out``.

    Raises:
        ValueError: For a scale that is not positive, or heads larger than 256.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}; attention needs a positive factor")
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads, v_head_dim = value_cache.shape[1:]
    if max(head_dim, v_head_dim) > MAX_HEAD_DIM:
        raise ValueError(f"heads of {max(head_dim, v_head_dim)} elements are not supported, up to {MAX_HEAD_DIM} are")
    num_rows, group = len(seq_lens), num_heads // num_kv_heads
    if out is None:
        out = query.new_empty(num_tokens, num_heads, v_head_dim)
    if num_tokens == 0 or num_rows == 0:
        return out
    if query.stride(2) != 1:
        query = query.contiguous()
    tiles = tiles or default_tiles(shape_of(query, key_cache, value_cache, window))
    key_scale, key_factor, key_scale_stride = _scale(key_scale)
    value_scale, value_factor, value_scale_stride = _scale(value_scale)
    kind = _KINDS.get(key_cache.dtype, "none")
    if kind != "none":
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    span = "full" if window is None else "chunked" if chunked else "sliding"
    few = tiles.few_queries(group)
    common: dict[str, Any] = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "query_start": query_start,
        "seq_lens": seq_lens,
        "block_table": block_table,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "tree_lens": None if tree is None else tree.lens,
        "tree_mask": None if tree is None else tree.mask,
        "tree_depth": None if tree is None else tree.depth,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "table_stride": block_table.stride(0),
        "key_block_stride": key_cache.stride(0),
        "key_token_stride": key_cache.stride(1),
        "key_head_stride": key_cache.stride(2),
        "value_block_stride": value_cache.stride(0),
        "value_token_stride": value_cache.stride(1),
        "value_head_stride": value_cache.stride(2),
        "key_scale_stride": key_scale_stride,
        "value_scale_stride": value_scale_stride,
        "tree_size": 0 if tree is None else tree.mask.shape[1],
        "window": window or 0,
        "scale": float(scale * key_factor),
        "scale_out": float(value_factor),
        "cap": float(softcap or 0.0),
        "num_heads": num_heads,
        "group": group,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "block_d": padded(head_dim),
        "block_v": padded(v_head_dim),
        "block_size": block_size,
        "kind": kind,
        "native": converts_e4m3(architecture(query.device)),
        "span": span,
        "softcap": softcap is not None,
    }
    if max_query_len > few:
        tile = tiles.prefill if tree is None else tiles.tree_tile()
        heads = min(group, tile.block_m)
        grid = (num_tokens // (tile.block_m // heads) + num_rows, num_kv_heads * triton.cdiv(group, heads))
        prefill_kernel[grid](
            out=out,
            num_rows=num_rows,
            min_queries=few + 1,
            heads=heads,
            block_m=tile.block_m,
            block_n=tile.block_n,
            **common,
            **tile.launch_options(),
        )
        if num_rows == 1:
            return out
    _attend_few(out, common, tiles, num_rows, max_query_len, max_seq_len)
    return out


def padded(size: int) -> int:
    """The power of two, at least 16, that a dimension of ``size`` elements is computed in."""
    return max(16, 1 << (size - 1).bit_length())


def _attend_few(
    out: Tensor, common: dict[str, Any], tiles: Tiles, num_rows: int, max_query_len: int, max_seq_len: int
) -> None:
    """Launch what serves the rows with few queries."""
    num_heads, group, span, window = common["num_heads"], common["group"], common["span"], common["window"]
    num_kv_heads = num_heads // group
    few = tiles.few_queries(group)
    queries = min(max_query_len, few)
    # Beside a prefill, rows with one query are the most likely, and drafts take several tiles.
    tile = tiles.decode_tile(tiles.decode_rows(group, queries if max_query_len <= few else 1))
    block_m = tile.block_m
    heads = min(group, block_m)
    max_parts = tiles.max_parts(num_kv_heads)
    reach = max_seq_len
    if span != "full":
        reach = min(reach, window + queries + tile.block_n)
    parts = min(max_parts, triton.cdiv(max(reach, 1), tiles.min_keys))
    slots = min(max_parts, parts * queries)
    part_out = part_sum = None
    if parts > 1:
        part_out = torch.empty(num_rows, num_heads, slots, common["v_head_dim"], dtype=torch.float32, device=out.device)
        part_sum = torch.empty(num_rows, num_heads, slots, dtype=torch.float32, device=out.device)
    q_tiles = triton.cdiv(queries, block_m // heads)
    columns = num_kv_heads * triton.cdiv(group, heads)
    programs = tiles.part_programs(num_rows * q_tiles * columns, parts)
    constants = {"max_parts": max_parts, "min_keys": tiles.min_keys, "block_n": tile.block_n}
    decode_kernel[(num_rows * q_tiles, columns, programs)](
        out=out,
        part_out=part_out,
        part_sum=part_sum,
        slots=slots,
        max_queries=few,
        q_tiles=q_tiles,
        heads=heads,
        block_m=block_m,
        **constants,
        **common,
        **tile.launch_options(),
    )
    if parts > 1:
        reduce_kernel[(num_rows * queries, num_heads)](
            out=out,
            part_out=part_out,
            part_sum=part_sum,
            query_start=common["query_start"],
            seq_lens=common["seq_lens"],
            sinks=common["sinks"],
            slots=slots,
            max_queries=few,
            queries=queries,
            window=window,
            num_heads=num_heads,
            v_head_dim=common["v_head_dim"],
            block_v=common["block_v"],
            span=span,
            chunk=min(_CHUNK, max_parts),
            **constants,
            num_warps=4,
        )


def _scale(scale: Tensor | float | None) -> tuple[Tensor | None, float, int]:
    """A scale as a tensor, as a number, and the tensor's stride over key heads."""
    if isinstance(scale, Tensor):
        return scale, 1.0, scale.stride(-1) if scale.numel() > 1 else 0
    return None, 1.0 if scale is None else float(scale), 0
