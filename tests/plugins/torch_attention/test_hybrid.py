"""Groups of layers over one pool: what is in blocks that left a window, and in those of other groups, is never read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from trivet.roles import AttentionMetadata, AttentionSupport, KVLayout, LayerKVSpec
from trivet_kernels.reference.oracle import paged_attention_oracle
from trivet_paged.groups import Group, plan_groups
from trivet_torch_attention.attention import TorchAttention

BLOCK, BLOCKS, HEADS, DIM = 4, 150, 2, 8
#: kind, window and key heads of every layer: groups of two layers, some with the same window, and one kind with fewer
#: bytes per token, whose blocks are longer
LAYERS = [("sliding", 9, 2), ("sliding", 9, 2), ("full", None, 2), ("sliding", 9, 2), ("chunked", 8, 2),
          ("sliding", 9, 2), ("full", None, 2), ("chunked", 8, 2), ("sliding", 3, 1), ("sliding", 3, 1)]  # fmt: skip
TYPES = {"float32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}


class Row:
    """A request: its tables, keys and values of every layer, and whether its worker's tables keep what was given
    back."""

    def __init__(self, groups: tuple[Group, ...], stale: bool) -> None:
        self.length, self.stale = 0, stale
        self.tables: list[list[int]] = [[] for _ in groups]
        self.given: list[int] = [0 for _ in groups]
        self.past = [(torch.empty(0, heads, DIM), torch.empty(0, heads, DIM)) for _, _, heads in LAYERS]


class Pool:
    """An attention over a hybrid layout, and the blocks of its pool."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        specs = [LayerKVSpec(i, kind, heads, DIM, dtype, window) for i, (kind, window, heads) in enumerate(LAYERS)]
        plan = plan_groups(specs, [AttentionSupport()] * len(specs), BLOCK)
        self.groups, self.dtype = plan.groups, TYPES[dtype]
        self.attention = TorchAttention(SimpleNamespace(device="cpu"))
        self.layout = KVLayout(tuple(specs), tuple(g.kv for g in plan.groups), plan.storage(BLOCKS))
        self.attention.allocate(self.layout)
        self.free = list(range(1, BLOCKS))
        self.rows: list[Row] = []

    def poison(self) -> None:
        """Fill every block that no row needs, the null block too, with bytes that are NaN in every type."""
        needed = {
            b for row in self.rows for table, gone in zip(row.tables, row.given, strict=True) for b in table[gone:]
        }
        others = [block for block in range(BLOCKS) if block not in needed]
        for layer in range(len(LAYERS)):
            for cache in self.attention.kv(layer):
                cache.view(torch.uint8)[others] = 255

    def step(self, counts: dict[int, int]) -> None:
        """Advance rows by so many tokens and compare all layers with the oracle."""
        rows = [self.rows[number] for number in counts]
        for row, count in zip(rows, counts.values(), strict=True):
            row.length += count
            for group, table in zip(self.groups, row.tables, strict=True):
                while len(table) * group.size < row.length:
                    table.append(self.free.pop(int(self.rng.integers(len(self.free)))))
        self.poison()
        metas = [self.metadata(group, rows, list(counts.values())) for group in self.groups]
        for meta in metas:
            self.attention.prepare(meta)
        for group, meta in zip(self.groups, metas, strict=True):
            for layer in group.kv.layers:
                self.check(layer, meta, rows, list(counts.values()))
        for row in rows:
            for group, table in zip(self.groups, row.tables, strict=True):
                gone, first = row.given[group.index], group.first_block(row.length)
                self.free += table[gone:first]
                row.given[group.index] = max(gone, first)
                if not row.stale:
                    table[:first] = [0] * first

    def metadata(self, group: Group, rows: list[Row], counts: list[int]) -> AttentionMetadata:
        size = group.size
        tables = [row.tables[group.index] for row in rows]
        table = torch.zeros(len(rows), max(map(len, tables)), dtype=torch.int32)
        places = []
        for r, (row, blocks) in enumerate(zip(rows, tables, strict=True)):
            table[r, : len(blocks)] = torch.tensor(blocks)
            positions = torch.arange(row.length - counts[r], row.length)
            places.append(table[r, positions // size].long() * size + positions % size)
        return AttentionMetadata(
            group=group.index,
            block_size=size,
            query_start=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor([row.length for row in rows], dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.cat(places),
            max_query_len=max(counts),
            max_seq_len=max(row.length for row in rows),
        )

    def check(self, layer: int, meta: AttentionMetadata, rows: list[Row], counts: list[int]) -> None:
        kind, window, heads = LAYERS[layer]
        query, key, value = (self.random(sum(counts), n) for n in (HEADS, heads, heads))
        out = self.attention.forward(layer, query, key, value, meta, scale=0.4, window=window)
        begin = 0
        for row, count in zip(rows, counts, strict=True):
            own = slice(begin, begin := begin + count)
            stored = [x[own].to(self.dtype).float() for x in (key, value)]
            row.past[layer] = tuple(torch.cat(both) for both in zip(row.past[layer], stored, strict=True))
            expected = paged_attention_oracle(
                query[own],
                *(past[:, None] for past in row.past[layer]),
                query_start=torch.tensor([0, count]),
                seq_lens=torch.tensor([row.length]),
                block_table=torch.arange(row.length)[None],
                scale=0.4,
                window=window,
                chunked=kind == "chunked",
            )
            torch.testing.assert_close(out[own], expected, rtol=1e-5, atol=1e-6, msg=f"layer {layer}: {LAYERS[layer]}")

    def random(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, DIM, generator=self.generator)


def test_the_layout_is_what_is_to_be_tested() -> None:
    pool = Pool("float32", 0)
    kinds = [(g.kv.kind, g.kv.window) for g in pool.groups]
    assert kinds.count(("sliding", 9)) > 1, "groups with the same window have tables of their own"
    assert {group.size for group in pool.groups} == {BLOCK, 2 * BLOCK}
    shared = [{LAYERS[layer][0] for layer in buffer.layers} for buffer in pool.layout.storage]
    assert {"full", "sliding", "chunked"} in shared, "blocks of one buffer change hands between kinds of layers"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_outside_of_a_row_s_needed_range_is_read(dtype: str, seed: int) -> None:
    pool = Pool(dtype, seed)
    pool.rows = [Row(pool.groups, stale=stale) for stale in (True, False, True)]
    # A long prompt at once, one in chunks, decodes; windows and chunks end within, at and after blocks.
    pool.step({0: 21, 1: 5})
    for number in range(8):
        counts = {0: 1, 1: int(pool.rng.integers(1, 10))}
        if number % 3 == 2:
            counts[2] = int(pool.rng.integers(1, 24))
        pool.step(counts)
    reused = [row.given[g.index] for row in pool.rows for g in pool.groups if g.windowed]
    assert sum(reused) > 20, "many blocks have left a window"
