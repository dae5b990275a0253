"""Paged attention for a mixed batch, vectorised with plain PyTorch operations.

What does not depend on the layer (which queries go together, where their keys are, what is masked) is planned once per
step: :func:`plan_rows` decides what depends on the rows' lengths only, and :func:`locate` finds the keys in one block
table, so that tables of equal windows share the first part. :func:`paged_attention` then runs per layer. Rows with few
queries (decodes, drafts under verification) are attended in batches of similar context length, rows with many one by
one, in tiles of queries.

Only keys that a row sees are ever read: a batch is padded by repeating the row's last key under a mask, so the weight
of padding is exactly zero, times a finite number, and whatever else the cache holds cannot leak into a result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trivet_kernels.reference.cache import read_tokens, widened

#: rows with at most this many queries are attended in batches
_FEW_QUERIES = 16
#: by how much the contexts of a batch may be padded: a share of the longest, or this many keys if that is more
_PAD_SHARE, _PAD_KEYS = 0.2, 32
#: queries of a tile; each tile reads only the keys that its queries see
_TILE = 256
#: scores that may be held at once where attention is not fused
_MAX_SCORES = 1 << 24


class _Span(NamedTuple):
    """How far back queries see: ``window`` tokens, themselves included, or to the start of their chunk of ``window``
    tokens."""

    window: int
    chunked: bool

    def first(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        return position // self.window * self.window if self.chunked else max(0, position - self.window + 1)

    def first_of(self, positions: Tensor) -> Tensor:
        """:meth:`first` of many positions; may be negative."""
        return positions // self.window * self.window if self.chunked else positions - (self.window - 1)


class _Row(NamedTuple):
    """A row of the step: its queries are tokens from ``first`` on and see keys from position ``low`` to ``seq_len``."""

    number: int
    first: int
    num_queries: int
    low: int
    seq_len: int

    @property
    def num_keys(self) -> int:
        return self.seq_len - self.low

    @property
    def fresh(self) -> bool:
        """Whether all of the row's context is computed in this very step."""
        return self.num_queries == self.seq_len


@dataclass(slots=True)
class _Batch:
    """``n`` rows of ``q`` queries each, with contexts padded to ``s`` keys."""

    num_queries: int
    rows: Tensor  #: [n, 1] int64: their numbers
    tokens: Tensor  #: [n * q] int64: which of the step's tokens they are
    positions: Tensor  #: [n, s] int64: places of their keys in the context
    visible: Tensor | None  #: [n, q, s] bool; None: everything is
    lengths: Tensor  #: [n, 1] int64: tokens of their contexts, trees included
    tree: tuple[Tensor, Tensor] | None  #: ``trunk`` and ``mask`` as for :func:`_text_places`; None: no row has one
    _biases: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)
    _places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _distances: Tensor | None = None

    def distances(self) -> Tensor:
        """``[n, q, s]``: how many positions of the text a key is before a query that sees it; made once for all
        layers."""
        if self._distances is None:
            own = self.lengths - self.num_queries + torch.arange(self.num_queries, device=self.lengths.device)
            places = self.positions
            if self.tree is not None:
                own, places = _text_places(own, *self.tree), _text_places(places, *self.tree)
            self._distances = own[:, :, None] - places[:, None, :]
        return self._distances

    def places(self, block_size: int) -> tuple[Tensor, Tensor]:
        """``[n, s]`` each: which of a row's blocks its keys are in, and where in the block; made once for all
        tables."""
        if block_size not in self._places:
            self._places[block_size] = self.positions // block_size, self.positions % block_size
        return self._places[block_size]

    def bias(self, dtype: torch.dtype, group: int) -> Tensor | None:
        """``[n, 1, group * q, s]``: 0 where a key is visible, -inf elsewhere; made once for all layers."""
        if self.visible is None:
            return None
        found = self._biases.get((dtype, group))
        if found is None:
            found = _bias(self.visible, dtype)[:, None].repeat(1, 1, group if self.num_queries > 1 else 1, 1)
            self._biases[dtype, group] = found
        return found


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How the rows of a step are attended, for one window and wherever their keys are; made by :func:`plan_rows`."""

    batches: list[_Batch]
    long_rows: list[_Row]  #: rows with many queries
    span: _Span | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A :class:`RowPlan` with the flat cache positions (int64) of all keys; made by :func:`locate`."""

    rows: RowPlan
    batch_keys: list[Tensor]  #: for each batch [n * s]
    row_keys: list[Tensor]  #: for each long row [num_keys]


def plan_rows(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None = None,
    chunked: bool = False,
    tree_lens: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> RowPlan:
    """Plan the attention of a step, apart from where the keys are.

    Arguments are as for :func:`~trivet_kernels.reference.oracle.paged_attention_oracle`. Lengths are read on the host,
    which waits for the device if they are on one.
    """
    starts: list[int] = query_start.tolist()
    trees = tree_lens.tolist() if tree_lens is not None else None
    span = None if window is None else _Span(window, chunked)
    few: dict[int, list[_Row]] = defaultdict(list)
    long_rows: list[_Row] = []
    for index, seq_len in enumerate(seq_lens.tolist()):
        first, count = starts[index], starts[index + 1] - starts[index]
        low = 0 if span is None else span.first(seq_len - count)
        row = _Row(index, first, count, low, seq_len)
        if count > _FEW_QUERIES and not (trees and trees[index]):
            long_rows.append(row)
        elif count:
            few[count].append(row)
    batches = [
        _plan_batch(batch, seq_lens.device, span, tree_lens, tree_mask)
        for rows in few.values()
        for batch in _similar(rows)
    ]
    return RowPlan(batches, long_rows, span)


def locate(rows: RowPlan, block_table: Tensor, block_size: int) -> AttentionPlan:
    """Find the keys of planned rows in a block table ``[R, max_blocks]``; entries that no query needs are not read."""
    batch_keys, row_keys = [], []
    for batch in rows.batches:
        blocks, offsets = batch.places(block_size)
        batch_keys.append((block_table[batch.rows, blocks].long() * block_size + offsets).flatten())
    for row in rows.long_rows:
        positions = torch.arange(row.low, row.seq_len, device=block_table.device)
        blocks = block_table[row.number, positions // block_size].long()
        row_keys.append(blocks * block_size + positions % block_size)
    return AttentionPlan(rows, batch_keys, row_keys)


def plan_attention(
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    chunked: bool = False,
    tree_lens: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> AttentionPlan:
    """:func:`plan_rows` and :func:`locate` in one. The plan serves every layer that uses these block tables and this
    window."""
    rows = plan_rows(query_start, seq_lens, window=window, chunked=chunked, tree_lens=tree_lens, tree_mask=tree_mask)
    return locate(rows, block_table, block_size)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
) -> Tensor:
    """Attend all rows of a planned step, in one layer whose keys and values have been written to the cache.

    Scores are softmaxed in float32 (float64 if ``query`` is).

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; heads ``g * num_heads / num_kv_heads …`` share key head ``g``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; what is read is converted to the query's dtype.
        value_cache: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``, likewise.
        plan: From :func:`plan_attention`.
        scale: Factor of the scores.
        softcap: ``c`` of ``c * tanh(score / c)``, applied before masks; None: none.
        sinks: ``[num_heads]`` logits that take part in the softmax's denominator only; None: none.
        alibi_slopes: ``[num_heads]``: ``slope * d`` is taken off the score of a key ``d`` positions back; None: 0.
        key: The step's own keys ``[num_tokens, num_kv_heads, head_dim]`` in the query's dtype: rows without earlier
            context use them in place of reading the cache. They must equal what is read from there.
        value: The step's own values, given if ``key`` is.
        key_scale: A number or ``[num_kv_heads]`` by which stored keys are multiplied; None: 1.
        value_scale: Likewise for values.

    Returns:
        ``[num_tokens, num_heads, v_head_dim]`` in the query's dtype; zeros for tokens of no row.
    """
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[3])
    sinks, slopes = (
        None if part is None else part.view(key_cache.shape[2], -1).to(query.device) for part in (sinks, alibi_slopes)
    )
    extras = _Extras(scale, softcap, sinks, slopes)
    stored = _Stored(key_cache, value_cache, query.dtype, key_scale, value_scale)
    for batch, where in zip(plan.rows.batches, plan.batch_keys, strict=True):
        out[batch.tokens] = _attend_batch(query[batch.tokens], stored, where, batch, extras)
    for row, where in zip(plan.rows.long_rows, plan.row_keys, strict=True):
        tokens = slice(row.first, row.first + row.num_queries)
        if key is not None and value is not None and row.fresh:
            keys, values = key[tokens], value[tokens]
        else:
            keys, values = stored.read(where)
        _attend_long_row(query[tokens], keys, values, row, plan.rows.span, extras, out[tokens])
    return out


class _Stored(NamedTuple):
    """A layer's cache, and how its numbers become those that attention computes with."""

    key_cache: Tensor
    value_cache: Tensor
    dtype: torch.dtype
    key_scale: Tensor | float | None
    value_scale: Tensor | float | None

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, num_kv_heads, head_dim]`` and ``[n, num_kv_heads, v_head_dim]`` of the tokens at flat positions."""
        return (
            widened(read_tokens(self.key_cache, positions), self.dtype, self.key_scale),
            widened(read_tokens(self.value_cache, positions), self.dtype, self.value_scale),
        )


class _Extras(NamedTuple):
    """What a layer asks for besides plain attention."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  #: [num_kv_heads, group]
    slopes: Tensor | None  #: [num_kv_heads, group]

    @property
    def fused(self) -> bool:
        """Whether PyTorch's fused attention can do it."""
        return self.softcap is None and self.sinks is None and self.slopes is None

    def lowered(self, bias: Tensor | None, distances: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores ``[..., num_kv_heads, group * q, s]``: ``bias``, and what ALiBi takes off keys at
        ``distances`` ``[..., q, s]``."""
        if self.slopes is None:
            return bias
        lowered = (distances[..., None, None, :, :] * -self.slopes.to(dtype)[:, :, None, None]).flatten(-3, -2)
        return lowered if bias is None else lowered + bias


def _similar(rows: list[_Row]) -> list[list[_Row]]:
    """Split rows into batches whose contexts are of similar length."""
    rows = sorted(rows, key=lambda row: row.num_keys, reverse=True)
    batches = [[rows[0]]]
    for row in rows[1:]:
        longest = batches[-1][0].num_keys
        if longest - row.num_keys > max(_PAD_KEYS, _PAD_SHARE * longest):
            batches.append([])
        batches[-1].append(row)
    return batches


def _plan_batch(
    rows: list[_Row],
    device: torch.device,
    span: _Span | None,
    tree_lens: Tensor | None,
    tree_mask: Tensor | None,
) -> _Batch:
    count = rows[0].num_queries
    index, first, low, seq_len = torch.tensor(
        [(row.number, row.first, row.low, row.seq_len) for row in rows], device=device
    ).unbind(1)
    steps = torch.arange(count, device=device)
    tokens = first[:, None] + steps
    positions = low[:, None] + torch.arange(max(row.num_keys for row in rows), device=device)
    trunk = None if tree_lens is None else (seq_len - tree_lens[index])[:, None]
    tree = None if trunk is None or tree_mask is None else (trunk, tree_mask[index])
    visible = None
    if count > 1 or len({row.num_keys for row in rows}) > 1:
        own = (seq_len - count)[:, None] + steps
        visible = _visible(own, positions, span) if tree is None else _visible_in_tree(own, positions, *tree, span)
    # Padding repeats the row's last key, which some query of the row sees anyway.
    places = positions.minimum(seq_len[:, None] - 1)
    return _Batch(count, index[:, None], tokens.flatten(), places, visible, seq_len[:, None], tree)


def _visible(own: Tensor, positions: Tensor, span: _Span | None) -> Tensor:
    """``[..., q, s]`` bool: which keys at ``positions`` ``[..., s]`` queries at positions ``own`` ``[..., q]`` see."""
    seen = positions[..., None, :] <= own[..., :, None]
    return seen if span is None else seen & (positions[..., None, :] >= span.first_of(own)[..., :, None])


def _visible_in_tree(own: Tensor, positions: Tensor, trunk: Tensor, mask: Tensor, span: _Span | None) -> Tensor:
    """Like :func:`_visible` for ``n`` rows that end in trees of drafts.

    Args:
        own: ``[n, q]`` where in the context the queries are.
        positions: ``[n, s]`` where in the context the keys are.
        trunk: ``[n, 1]`` tokens before the tree.
        mask: ``[n, max_tree, max_tree]`` bool: which nodes a node sees.
        span: As for :func:`_visible`; applies to a node's position in the text, which its depth says.
    """
    size = mask.shape[1]
    row = torch.arange(len(mask), device=mask.device)[:, None]
    own_node, node = own - trunk, positions - trunk
    own_index, index = own_node.clamp(0, size - 1), node.clamp(0, size - 1)
    seen = _visible(own, positions, None)
    both = (own_node[:, :, None] >= 0) & (node[:, None, :] >= 0)
    seen &= mask[row[:, :, None], own_index[:, :, None], index[:, None, :]] | ~both
    if span is not None:
        own_place, place = _text_places(own, trunk, mask), _text_places(positions, trunk, mask)
        seen &= place[:, None, :] >= span.first_of(own_place)[:, :, None]
    return seen


def _text_places(positions: Tensor, trunk: Tensor, mask: Tensor) -> Tensor:
    """Which positions of the text those of contexts ``[n, ...]`` are; a node of a tree is as far on as it is deep.
    Arguments as for :func:`_visible_in_tree`."""
    node = positions - trunk
    depth = mask.sum(2).gather(1, node.clamp(0, mask.shape[1] - 1))
    return torch.where(node < 0, positions, trunk + depth - 1)


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _attend_batch(query: Tensor, stored: _Stored, where: Tensor, batch: _Batch, extras: _Extras) -> Tensor:
    """``[n * q, num_heads, v_head_dim]`` for the batch's own tokens ``[n * q, num_heads, head_dim]``."""
    num_kv_heads = stored.key_cache.shape[2]
    num_rows, group = len(batch.rows), query.shape[1] // num_kv_heads
    keys, values = (part.view(num_rows, -1, *part.shape[1:]).transpose(1, 2) for part in stored.read(where))
    # The heads of a group become queries of their shared key head, so keys are read once and never repeated.
    grouped = query.view(num_rows, batch.num_queries, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    bias = batch.bias(query.dtype if extras.fused else _wide(query.dtype), group)
    if extras.slopes is not None:
        bias = extras.lowered(bias, batch.distances(), _wide(query.dtype))
    out = _attend(grouped.flatten(2, 3), keys, values, bias, extras)
    out = out.reshape(num_rows, num_kv_heads, group, batch.num_queries, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(len(batch.tokens), query.shape[1], -1)


def _attend_long_row(
    query: Tensor, keys: Tensor, values: Tensor, row: _Row, span: _Span | None, extras: _Extras, out: Tensor
) -> None:
    """Fill ``out`` ``[count, num_heads, v_head_dim]`` for one row's queries; its keys start at position ``row.low``."""
    (count, num_heads, _), num_kv_heads = query.shape, keys.shape[1]
    if extras.fused and row.fresh and (span is None or span.first(row.seq_len - 1) == 0):
        heads = [x.transpose(0, 1)[None] for x in (query, keys, values)]
        out.copy_(_fused(heads[0], heads[1], heads[2], None, extras.scale, causal=True)[0].transpose(0, 1))
        return
    size = _TILE if extras.fused else max(1, min(_TILE, _MAX_SCORES // (num_heads * len(keys))))
    group = num_heads // num_kv_heads
    dtype = query.dtype if extras.fused else _wide(query.dtype)
    for begin in range(0, count, size):
        end = min(begin + size, count)
        start, high = row.seq_len - count + begin, row.seq_len - count + end
        own = torch.arange(start, high, device=query.device)
        low = row.low if span is None else span.first(start)
        part = slice(low - row.low, high - row.low)
        seen = torch.arange(low, high, device=query.device)
        bias = _bias(_visible(own, seen, span), dtype)
        tile = query[begin:end].transpose(0, 1)
        key_heads, value_heads = keys[part].transpose(0, 1)[None], values[part].transpose(0, 1)[None]
        if extras.fused:
            attended = _fused(tile[None], key_heads, value_heads, bias, extras.scale)[0]
        else:
            grouped = tile.reshape(1, num_kv_heads, group * len(own), -1)
            lowered = extras.lowered(bias.repeat(group, 1), own[:, None] - seen, dtype)
            attended = _attend(grouped, key_heads, value_heads, lowered, extras)
            attended = attended.reshape(num_heads, len(own), -1)
        out[begin:end] = attended.transpose(0, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, extras: _Extras) -> Tensor:
    """``[b, num_kv_heads, group * q, v_head_dim]`` for queries of that shape, those of one head after the other."""
    if extras.fused:
        return _fused(query, keys, values, bias, extras.scale)
    wide = _wide(query.dtype)
    scores = query.to(wide) @ keys.to(wide).transpose(2, 3) * extras.scale
    if extras.softcap is not None:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    if bias is not None:
        scores = scores + bias
    if extras.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = extras.sinks.to(wide).repeat_interleave(query.shape[2] // extras.sinks.shape[1], 1)[None, :, :, None]
        highest = scores.amax(-1, keepdim=True).maximum(sinks)
        exponentials = (scores - highest).exp()
        weights = exponentials / (exponentials.sum(-1, keepdim=True) + (sinks - highest).exp())
    return (weights @ values.to(wide)).to(query.dtype)


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """PyTorch's attention ``[b, heads, q, v_head_dim]``; several query heads may share a key head."""
    head_dim, v_head_dim = query.shape[3], values.shape[3]
    if head_dim < v_head_dim:
        query, keys = (functional.pad(x, (0, v_head_dim - head_dim)) for x in (query, keys))
    elif v_head_dim < head_dim:
        # With head sizes that differ PyTorch falls back to holding all scores at once.
        values = functional.pad(values, (0, head_dim - v_head_dim))
    out = functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[..., :v_head_dim]
