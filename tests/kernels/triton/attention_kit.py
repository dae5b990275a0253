"""Steps over filled caches, and what attention over them should give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trivet_kernels.reference.oracle import paged_attention_oracle
from trivet_kernels.triton.attention import paged_attention, plan_tree
from trivet_kernels.triton.tune import Tile, Tiles

#: small enough that short contexts are cut into parts
SMALL = Tiles(Tile(32, 16, 4, 1), Tile(0, 16, 4, 1), min_keys=32)
SCALE = 0.3


@dataclass
class Case:
    """A step whose keys and values are in the cache."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    window: int | None = None
    chunked: bool = False
    tree_lens: Tensor | None = None
    tree_mask: Tensor | None = None
    #: by how much the host's bounds are above the rows' lengths, as they are where a graph is replayed
    slack: int = 0
    tiles: Tiles = field(default=SMALL)

    def run(self, **extras: Any) -> Tensor:
        out = self.query.new_full((*self.query.shape[:2], self.value_cache.shape[3]), torch.nan)
        counts = self.query_start[1:] - self.query_start[:-1]
        tree = None if self.tree_lens is None else plan_tree(self.tree_lens, self.tree_mask)
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            max_query_len=int(counts.max()),
            max_seq_len=int(self.seq_lens.max()) + self.slack,
            scale=SCALE,
            window=self.window,
            chunked=self.chunked,
            tree=tree,
            tiles=self.tiles,
            out=out,
            **extras,
        )

    def expected(self, **extras: Any) -> Tensor:
        """By the oracle in float64, of the same numbers."""
        return paged_attention_oracle(
            self.query.double(),
            self.key_cache.float().double(),
            self.value_cache.float().double(),
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            window=self.window,
            chunked=self.chunked,
            tree_lens=self.tree_lens,
            tree_mask=self.tree_mask,
            scale=SCALE,
            **extras,
        )

    def check(self, tolerance: float = 1e-5, **extras: Any) -> None:
        out = self.run(**extras)
        assert out.dtype == self.query.dtype
        torch.testing.assert_close(out.double(), self.expected(**extras), rtol=tolerance, atol=tolerance)


def make_case(
    rows: list[tuple[int, int]],
    *,
    block_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    window: int | None = None,
    chunked: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
    poison: float = torch.nan,
) -> Case:
    """``rows`` are (queries, context). What no query sees is ``poison``; table entries outside windows are stale."""
    g = torch.Generator().manual_seed(seed)
    kv_dtype, v_head_dim = kv_dtype or dtype, v_head_dim or head_dim
    needs = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(needs) + 2  # the null block, and one that nobody owns
    order = (torch.randperm(num_blocks - 2, generator=g) + 1).tolist()
    key_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), poison).to(kv_dtype)
    value_cache = torch.full((num_blocks, block_size, kv_heads, v_head_dim), poison).to(kv_dtype)
    table = torch.full((len(rows), max(needs) + 1), num_blocks - 1, dtype=torch.int32)
    for row, (count, seq_len) in enumerate(rows):
        blocks = [order.pop() for _ in range(needs[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        first = seq_len - count
        low = 0 if window is None else first // window * window if chunked else max(0, first - window + 1)
        table[row, : low // block_size] = torch.randint(0, num_blocks, (low // block_size,), generator=g)
        for position in range(low, seq_len):
            place = int(table[row, position // block_size]), position % block_size
            key_cache[place] = torch.randn(kv_heads, head_dim, generator=g).to(kv_dtype)
            value_cache[place] = torch.randn(kv_heads, v_head_dim, generator=g).to(kv_dtype)
    counts = torch.tensor([0] + [count for count, _ in rows])
    query = torch.randn(int(counts.sum()), heads, head_dim, generator=g).to(dtype)
    seq_lens = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    return Case(query, key_cache, value_cache, counts.cumsum(0).int(), seq_lens, table, window, chunked)


def tree_mask(parents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Lengths and masks of trees given by each node's parent (-1: the last known token)."""
    size = max(map(len, parents))
    mask = torch.zeros(len(parents), size, size, dtype=torch.bool)
    for row, tree in enumerate(parents):
        for node, parent in enumerate(tree):
            mask[row, node, node] = True
            if parent >= 0:
                mask[row, node] |= mask[row, parent]
    return torch.tensor([len(tree) for tree in parents], dtype=torch.int32), mask
