"""A slow and obvious paged attention, to judge the others by. Works in float64 when its inputs are."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention_oracle(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_lens: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
) -> Tensor:
    """Attend one query and one head at a time, reading one key at a time.

    Row ``i``'s queries are ``query[query_start[i]:query_start[i + 1]]`` and sit at the end of its context of
    ``seq_lens[i]`` tokens, whose keys and values have been written to the cache. A query at position ``p`` sees
    positions ``max(0, p - window + 1) … p``, or if ``chunked`` positions ``p // window * window … p``.

    The last ``tree_lens[i]`` queries are nodes of a tree: node ``j`` sees everything before the tree and the nodes
    ``k`` with ``tree_mask[i, j, k]`` (its ancestors and itself). A node's position, from which the window counts back
    and which says its chunk, is that of its depth.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``.
        query_start: ``[R + 1]`` integers.
        seq_lens: ``[R]`` integers.
        block_table: ``[R, max_blocks]`` integers; entries that no query needs are not read.
        scale: Factor of the scores.
        window: Tokens that a query sees, itself included, or tokens of a chunk; None: all.
        chunked: Whether queries see what precedes them in their chunk, in place of a window that slides.
        softcap: ``c`` of ``c * tanh(score / c)``, applied before masks.
        sinks: ``[num_heads]`` logits that take part in the softmax's denominator only.
        alibi_slopes: ``[num_heads]``: ``slope * d`` is taken off the score of a key ``d`` positions of the text back.
        tree_lens: ``[R]`` integers.
        tree_mask: ``[R, max_tree, max_tree]`` bool.
        key_scale: A number or ``[num_kv_heads]`` by which stored keys are multiplied; None: 1.
        value_scale: Likewise for values.

    Returns:
        ``[num_tokens, num_heads, v_head_dim]`` in float64 if ``query`` is float64, in float32 otherwise.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_tokens, num_heads, _ = query.shape
    block_size, num_kv_heads, v_head_dim = value_cache.shape[1:]
    out = torch.zeros(num_tokens, num_heads, v_head_dim, dtype=dtype)
    key_scales, value_scales = (
        torch.as_tensor(1.0 if scale is None else scale, dtype=dtype).expand(num_kv_heads)
        for scale in (key_scale, value_scale)
    )
    slopes: list[float] = [0.0] * num_heads if alibi_slopes is None else alibi_slopes.tolist()
    for row in range(len(seq_lens)):
        first, last = int(query_start[row]), int(query_start[row + 1])
        seq_len = int(seq_lens[row])
        tree_len = int(tree_lens[row]) if tree_lens is not None else 0
        trunk = seq_len - tree_len  # positions from here on are nodes of the tree

        def depth(node: int, row: int = row) -> int:
            assert tree_mask is not None
            return int(tree_mask[row, node].sum())

        def position(index: int, trunk: int = trunk) -> int:
            return index if index < trunk else trunk + depth(index - trunk) - 1

        for token in range(first, last):
            index = seq_len - (last - token)  # where this query's own key is
            visible = []
            for other in range(index + 1):
                if index >= trunk and other >= trunk:
                    assert tree_mask is not None
                    seen = bool(tree_mask[row, index - trunk, other - trunk])
                else:
                    seen = True
                if window is not None and chunked:
                    seen = seen and position(other) // window == position(index) // window
                elif window is not None:
                    seen = seen and position(other) > position(index) - window
                if seen:
                    visible.append(other)
            places = [(int(block_table[row, p // block_size]), p % block_size) for p in visible]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = []
                for other, (block, offset) in zip(visible, places, strict=True):
                    key = key_cache[block, offset, kv_head].to(dtype) * key_scales[kv_head]
                    score = scale * float(query[token, head].to(dtype) @ key)
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    scores.append(score - slopes[head] * (position(index) - position(other)))
                if sinks is not None:
                    scores.append(float(sinks[head]))
                weights = torch.softmax(torch.tensor(scores, dtype=dtype), dim=0)
                for weight, (block, offset) in zip(weights, places, strict=False):
                    value = value_cache[block, offset, kv_head].to(dtype) * value_scales[kv_head]
                    out[token, head] += weight * value
    return out
