"""Paged attention against the oracle, and against what a cache may hold besides a row's own keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivet_kernels.reference import attention
from trivet_kernels.reference.attention import paged_attention, plan_attention
from trivet_kernels.reference.cache import reshape_and_cache
from trivet_kernels.reference.oracle import paged_attention_oracle


@dataclass
class Case:
    """A step over a filled cache. ``key`` and ``value`` are the step's own, already written."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    window: int | None = None
    chunked: bool = False
    tree_lens: Tensor | None = None
    tree_mask: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]

    def run(self, *, fresh: bool = False, **extras: object) -> Tensor:
        plan = plan_attention(
            self.query_start,
            self.seq_lens,
            self.block_table,
            self.block_size,
            window=self.window,
            chunked=self.chunked,
            tree_lens=self.tree_lens,
            tree_mask=self.tree_mask,
        )
        own = {"key": self.key, "value": self.value} if fresh else {}
        return paged_attention(self.query, self.key_cache, self.value_cache, plan, scale=0.3, **own, **extras)

    def oracle(self, **extras: object) -> Tensor:
        return paged_attention_oracle(
            self.query,
            self.key_cache,
            self.value_cache,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            window=self.window,
            chunked=self.chunked,
            tree_lens=self.tree_lens,
            tree_mask=self.tree_mask,
            scale=0.3,
            **extras,
        )


def make_case(
    rows: list[tuple[int, int]],
    *,
    block_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    window: int | None = None,
    chunked: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    poison: float = torch.nan,
) -> Case:
    """``rows`` are (queries, context). What no query sees is ``poison``; table entries outside windows are stale."""
    g = torch.Generator().manual_seed(seed)
    v_head_dim = v_head_dim or head_dim
    needs = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(needs) + 2  # the null block, and one that nobody owns
    order = (torch.randperm(num_blocks - 2, generator=g) + 1).tolist()
    key_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), poison, dtype=dtype)
    value_cache = torch.full((num_blocks, block_size, kv_heads, v_head_dim), poison, dtype=dtype)
    table = torch.full((len(rows), max(needs) + 1), num_blocks - 1, dtype=torch.int32)
    keys, values = [], []
    for row, (count, seq_len) in enumerate(rows):
        blocks = [order.pop() for _ in range(needs[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        first = seq_len - count
        low = 0 if window is None else first // window * window if chunked else max(0, first - window + 1)
        table[row, : low // block_size] = torch.randint(0, num_blocks, (low // block_size,), generator=g)
        positions = torch.arange(low, seq_len)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        key = torch.randn(len(positions), kv_heads, head_dim, generator=g, dtype=torch.float64).to(dtype)
        value = torch.randn(len(positions), kv_heads, v_head_dim, generator=g, dtype=torch.float64).to(dtype)
        reshape_and_cache(key, value, key_cache, value_cache, slots)
        keys.append(key[len(positions) - count :])
        values.append(value[len(positions) - count :])
    counts = torch.tensor([0] + [count for count, _ in rows])
    query = torch.randn(int(counts.sum()), heads, head_dim, generator=g, dtype=torch.float64).to(dtype)
    seq_lens = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    starts = counts.cumsum(0).int()
    own = torch.cat(keys), torch.cat(values)
    return Case(query, *own, key_cache, value_cache, starts, seq_lens, table, window, chunked)


SLOPES = torch.tensor([0.5, 0.25, 0.01, 1.0], dtype=torch.float64)
MIXED = [(1, 1), (1, 13), (3, 3), (1, 40), (20, 20), (5, 9), (18, 33), (1, 90), (1, 57), (3, 30)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 17, 1000])
@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"alibi_slopes": SLOPES},
        {"alibi_slopes": SLOPES, "softcap": 2.0},
    ],
    ids=" ".join,
)
def test_mixed_batch_equals_oracle(window: int | None, chunked: bool, extras: dict[str, object], fresh: bool) -> None:
    case = make_case(MIXED, window=window, chunked=chunked)
    torch.testing.assert_close(case.run(fresh=fresh, **extras), case.oracle(**extras), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (7, 1)])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (12, 8), (8, 12)])
@pytest.mark.parametrize("extras", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_head_layouts_equal_oracle(
    heads: int, kv_heads: int, head_dim: int, v_head_dim: int, extras: dict[str, object]
) -> None:
    rows = [(1, 7), (19, 25), (2, 5), (17, 17)]
    case = make_case(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    out = case.run(fresh=True, **extras)
    assert out.shape == (39, heads, v_head_dim)
    torch.testing.assert_close(out, case.oracle(**extras), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_any_block_size(block_size: int) -> None:
    case = make_case([(1, 50), (30, 41), (1, 2)], block_size=block_size, window=9)
    torch.testing.assert_close(case.run(), case.oracle(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_lower_precisions(dtype: torch.dtype, tolerance: float, extras: dict[str, object]) -> None:
    case = make_case([(1, 60), (1, 55), (25, 40), (4, 20)], dtype=dtype)
    out = case.run(**extras)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), case.oracle(**extras), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"alibi_slopes": SLOPES.float()}], ids="".join)
def test_tiles_of_a_long_prefill_equal_the_whole(
    window: int | None, chunked: bool, extras: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([(300, 640)], window=window, chunked=chunked, block_size=16, dtype=torch.float32)
    whole = case.run(**extras)
    monkeypatch.setattr(attention, "_TILE", 7)
    torch.testing.assert_close(case.run(**extras), whole, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(attention, "_MAX_SCORES", 1)
    torch.testing.assert_close(case.run(**extras), whole, rtol=1e-5, atol=1e-6)


def test_a_query_sees_its_chunk_up_to_itself() -> None:
    # Equal keys: what a query gets is the mean of the values that it sees.
    case = make_case([(20, 20)], window=8, chunked=True, heads=2, kv_heads=2)
    case.key_cache.fill_(1.0)
    expected = torch.stack([case.value[p // 8 * 8 : p + 1].mean(0) for p in range(20)])
    torch.testing.assert_close(case.run(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(case.oracle(), expected, rtol=1e-10, atol=1e-12)


def test_a_window_of_one_sees_only_the_token_itself_in_a_long_tile() -> None:
    # Whole stretches of a tile's keys are masked for most of its queries.
    case = make_case([(1100, 1100)], window=1, heads=2, kv_heads=2, dtype=torch.float32)
    torch.testing.assert_close(case.run(fresh=True), case.value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_a_row_does_not_depend_on_its_batch(window: int | None, extras: dict[str, object]) -> None:
    case = make_case(MIXED, window=window, dtype=torch.float32)
    together = case.run(**extras)
    for row in range(len(MIXED)):
        first, last = case.query_start[row].item(), case.query_start[row + 1].item()
        alone = replace(
            case,
            query=case.query[first:last],
            query_start=torch.tensor([0, last - first]),
            seq_lens=case.seq_lens[row : row + 1],
            block_table=case.block_table[row : row + 1],
        )
        torch.testing.assert_close(alone.run(**extras), together[first:last], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_a_poisoned_row_ends_alone(poison: float) -> None:
    case = make_case(MIXED, dtype=torch.float32)
    clean = case.run()
    first, last = case.query_start[3].item(), case.query_start[4].item()
    block = case.block_table[3, 0]
    case.key_cache[block] = poison
    case.value_cache[block] = poison
    spoilt = case.run()
    others = [token for token in range(len(clean)) if not first <= token < last]
    assert torch.equal(spoilt[others], clean[others])
    assert not torch.equal(spoilt[first:last], clean[first:last])


def test_a_chunked_prefill_equals_one_piece() -> None:
    whole = make_case([(120, 120)], dtype=torch.float32)
    expected = whole.run(fresh=True)
    for chunk in (1, 16, 50):
        parts = []
        for begin in range(0, 120, chunk):
            end = min(begin + chunk, 120)
            part = replace(
                whole,
                query=whole.query[begin:end],
                query_start=torch.tensor([0, end - begin]),
                seq_lens=torch.tensor([end]),
            )
            parts.append(part.run())
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


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


TREES = [[-1, 0, 0, 1, -1, 4], [-1, -1, -1], [], [-1, 0, 1, 2, 3]]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 11])
@pytest.mark.parametrize(
    "extras", [{}, {"softcap": 2.0}, {"sinks": torch.ones(4)}, {"alibi_slopes": SLOPES}], ids="".join
)
def test_trees_equal_oracle(window: int | None, chunked: bool, extras: dict[str, object]) -> None:
    rows = [(1 + len(tree), 9 + 4 * len(tree)) for tree in TREES]
    case = make_case(rows, window=window, chunked=chunked)
    case.tree_lens, case.tree_mask = tree_mask(TREES)
    torch.testing.assert_close(case.run(**extras), case.oracle(**extras), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_path_of_a_tree_equals_the_chain(window: int | None, chunked: bool) -> None:
    """What a node gets is what it would get if its ancestors were the only tokens after the known ones."""
    parents = [-1, 0, 0, 2, 3, 1]
    case = make_case([(1 + len(parents), 20)], window=window, chunked=chunked, block_size=1)
    case.tree_lens, case.tree_mask = tree_mask([parents])
    out = case.run()
    path = [0, 2, 3, 4]
    kept = list(range(14)) + [14 + node for node in path]
    chain = replace(
        case,
        query=case.query[[0] + [1 + node for node in path]],
        query_start=torch.tensor([0, 5]),
        seq_lens=torch.tensor([18]),
        block_table=case.block_table[:, kept],
        tree_lens=None,
        tree_mask=None,
    )
    torch.testing.assert_close(chain.run(), out[[0] + [1 + node for node in path]], rtol=1e-10, atol=1e-12)


def test_a_long_row_may_end_in_a_tree() -> None:
    case = make_case([(30, 42), (25, 25)])
    case.tree_lens, case.tree_mask = tree_mask([[-1, 0, 0], []])
    torch.testing.assert_close(case.run(), case.oracle(), rtol=1e-10, atol=1e-12)


def test_rows_without_queries_are_left_out() -> None:
    case = make_case([(1, 5), (2, 6)])
    case.query_start = torch.tensor([0, 1, 1, 3])
    case.seq_lens = torch.tensor([5, 0, 6])
    case.block_table = case.block_table[[0, 0, 1]]
    torch.testing.assert_close(case.run(), case.oracle(), rtol=1e-10, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 40)), min_size=1, max_size=5),
    block_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 45),
    chunked=st.booleans(),
    group=st.integers(1, 3),
    softcap=st.none() | st.just(1.5),
    sinks=st.booleans(),
    slopes=st.booleans(),
    fresh=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_batch_equals_oracle(
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    chunked: bool,
    group: int,
    softcap: float | None,
    sinks: bool,
    slopes: bool,
    fresh: bool,
    seed: int,
) -> None:
    rows = [(count, count + before) for count, before in rows]
    shape = {"block_size": block_size, "heads": 2 * group, "head_dim": 4}
    case = make_case(rows, window=window, chunked=chunked, seed=seed, **shape)
    spread = torch.linspace(-1, 1, 2 * group, dtype=torch.float64)
    extras = {
        "softcap": softcap,
        "sinks": spread if sinks else None,
        "alibi_slopes": spread / 3 if slopes else None,
    }
    torch.testing.assert_close(case.run(fresh=fresh, **extras), case.oracle(**extras), rtol=1e-9, atol=1e-11)
