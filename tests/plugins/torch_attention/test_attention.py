"""The attention provider ``torch`` through its role: storage, writes, plans shared by layers."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trivet.errors import CacheMemoryError
from trivet.roles import AttentionMetadata, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet_kernels.reference.oracle import paged_attention_oracle
from trivet_torch_attention.attention import TorchAttention
from trivet_torch_attention.plugin import trivet_providers

BLOCK, BLOCKS = 4, 12


def spec(layer: int, **changes: object) -> LayerKVSpec:
    given = {"kind": "full", "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"} | changes
    return LayerKVSpec(layer=layer, **given)


def build(specs: list[LayerKVSpec], groups: list[tuple[int, ...]], storage: list[tuple[int, ...]]) -> TorchAttention:
    attention = TorchAttention(SimpleNamespace(device="cpu"))
    attention.allocate(
        KVLayout(
            specs=tuple(specs),
            groups=tuple(KVGroup(i, layers, "full", BLOCK) for i, layers in enumerate(groups)),
            storage=tuple(KVStorage(layers, BLOCKS) for layers in storage),
        )
    )
    return attention


def metadata(rows: list[tuple[int, int, list[int]]], group: int = 0) -> AttentionMetadata:
    """``rows``: queries, context length, blocks."""
    counts = torch.tensor([0] + [count for count, _, _ in rows])
    table = torch.zeros(len(rows), max(len(blocks) for _, _, blocks in rows), dtype=torch.int32)
    places = []
    for row, (count, seq_len, blocks) in enumerate(rows):
        table[row, : len(blocks)] = torch.tensor(blocks)
        positions = torch.arange(seq_len - count, seq_len)
        places.append(table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK)
    return AttentionMetadata(
        group=group,
        block_size=BLOCK,
        query_start=counts.cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len, _ in rows], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(places),
        max_query_len=max(count for count, _, _ in rows),
        max_seq_len=max(seq_len for _, seq_len, _ in rows),
    )


def tokens(count: int, heads: int = 2, dim: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed))


def oracle(attention: TorchAttention, layer: int, query: Tensor, meta: AttentionMetadata, **extras: object) -> Tensor:
    return paged_attention_oracle(
        query,
        *attention.kv(layer),
        query_start=meta.query_start,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        scale=0.5,
        **extras,
    )


def test_a_prefill_and_the_decodes_after_it() -> None:
    attention = build([spec(0)], [(0,)], [(0,)])
    steps = [
        [(18, 18, [3, 7, 1, 9, 2]), (3, 3, [5])],
        [(1, 19, [3, 7, 1, 9, 2]), (1, 4, [5])],
        [(2, 21, [3, 7, 1, 9, 2, 4]), (1, 5, [5, 11])],
    ]
    for number, rows in enumerate(steps):
        meta = metadata(rows)
        attention.prepare(meta)
        total = len(meta.slot_mapping)
        query, key, value = (tokens(total, heads, seed=3 * number + i) for i, heads in enumerate((4, 2, 2)))
        out = attention.forward(0, query, key, value, meta, scale=0.5)
        key_cache, value_cache = attention.kv(0)
        assert torch.equal(key_cache.view(-1, 2, 8)[meta.slot_mapping], key)
        assert torch.equal(value_cache.view(-1, 2, 8)[meta.slot_mapping], value)
        torch.testing.assert_close(out, oracle(attention, 0, query, meta), rtol=1e-5, atol=1e-6)


def test_layers_of_a_group_may_have_different_windows() -> None:
    attention = build([spec(0), spec(1)], [(0, 1)], [(0,), (1,)])
    meta = metadata([(20, 20, [1, 2, 3, 4, 5])])
    attention.prepare(meta)
    query, key, value = tokens(20, 4, seed=1), tokens(20, seed=2), tokens(20, seed=3)
    for layer, window in ((0, None), (1, 3), (0, 64)):
        out = attention.forward(layer, query, key, value, meta, scale=0.5, window=window)
        expected = oracle(attention, layer, query, meta, window=window)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_softcap_and_sinks_reach_the_kernel() -> None:
    attention = build([spec(0)], [(0,)], [(0,)])
    meta = metadata([(5, 5, [1, 2])])
    query, key, value = 3 * tokens(5, 4, seed=1), tokens(5, seed=2), tokens(5, seed=3)
    plain = attention.forward(0, query, key, value, meta, scale=0.5)
    for extras in ({"softcap": 0.5}, {"sinks": torch.tensor([1.0, 2.0, -1.0, 0.0])}):
        out = attention.forward(0, query, key, value, meta, scale=0.5, **extras)
        torch.testing.assert_close(out, oracle(attention, 0, query, meta, **extras), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(out, plain, atol=1e-3)


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"num_kv_heads": 1},
        {"num_kv_heads": 1, "head_dim": 3, "dtype": "bfloat16"},
        {"head_dim": 6, "v_head_dim": 12},
    ],
    ids=["alike", "smaller", "odd", "larger values"],
)
def test_layers_of_different_groups_share_a_buffer(second: dict[str, object]) -> None:
    """Block ids are of one pool: what one group writes into its blocks leaves the other group's alone."""
    specs = [spec(0, v_head_dim=6), spec(1, **second)]
    attention = build(specs, [(0,), (1,)], [(0, 1)])
    shapes = [(s.num_kv_heads, s.head_dim, s.v_head_dim or s.head_dim) for s in specs]
    blocks = {0: [1, 4, 6], 1: [2, 3, 5]}
    written = {}
    for layer, (heads, dim, v_dim) in enumerate(shapes):
        meta = metadata([(10, 10, blocks[layer])], group=layer)
        dtype = attention.kv(layer)[0].dtype
        key, value = tokens(10, heads, dim, seed=layer).to(dtype), tokens(10, heads, v_dim, seed=9).to(dtype)
        out = attention.forward(layer, tokens(10, heads, dim, seed=5).to(dtype), key, value, meta, scale=0.5)
        assert out.shape == (10, heads, v_dim)
        written[layer] = key, value, blocks[layer]
    for layer, (key, value, owned) in written.items():
        key_cache, value_cache = attention.kv(layer)
        assert key_cache.shape == (BLOCKS, BLOCK, *key.shape[1:])
        assert torch.equal(key_cache[owned].flatten(0, 1)[:10], key)
        assert torch.equal(value_cache[owned].flatten(0, 1)[:10], value)
    attention.zero_blocks(1, torch.tensor(blocks[1]))
    attention.copy_blocks(0, torch.tensor([[1, 9]]))
    key, value, _ = written[0]
    for block in (1, 9):
        assert torch.equal(attention.kv(0)[0][block], key[:BLOCK])
        assert torch.equal(attention.kv(0)[1][block], value[:BLOCK])
    assert not any(cache[blocks[1]].any() for cache in attention.kv(1))


def test_groups_of_blocks_change_in_all_their_layers_and_no_others() -> None:
    attention = build([spec(i) for i in range(3)], [(0, 2), (1,)], [(0,), (1,), (2,)])
    caches = [cache for layer in range(3) for cache in attention.kv(layer)]
    for cache in caches:
        cache.copy_(torch.arange(cache.numel()).view(cache.shape))
    before = caches[0].clone()
    attention.move_tokens(0, torch.tensor([5, 6]), torch.tensor([4, 5]))
    attention.copy_blocks(0, torch.tensor([[1, 7]], dtype=torch.int32))
    attention.zero_blocks(0, torch.tensor([3], dtype=torch.int32))
    for layer in (0, 2):
        for cache in attention.kv(layer):
            assert torch.equal(cache[7, [0, 1, 2, 3]], before[1, [1, 2, 2, 3]])
            assert not cache[3].any()
    assert all(torch.equal(cache, before) for cache in attention.kv(1))


def test_a_cache_in_lower_precision_rounds_keys_once() -> None:
    attention = build([spec(0, dtype="bfloat16")], [(0,)], [(0,)])
    meta = metadata([(20, 20, [1, 2, 3, 4, 5]), (1, 1, [6])])
    query, key, value = tokens(21, 4, seed=1), tokens(21, seed=2), tokens(21, seed=3)
    out = attention.forward(0, query, key, value, meta, scale=0.5)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, oracle(attention, 0, query, meta), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", [1, 3, 5000])
def test_blocks_begin_where_pages_of_memory_do(blocks: int) -> None:
    attention = TorchAttention(SimpleNamespace(device="cpu"))
    layout = KVLayout(
        specs=(spec(0), spec(1, v_head_dim=4)),
        groups=(KVGroup(0, (0, 1), "full", BLOCK),),
        storage=(KVStorage((0,), blocks), KVStorage((1,), blocks)),
    )
    attention.allocate(layout)
    for layer in (0, 1):
        for cache in attention.kv(layer):
            assert cache.data_ptr() % mmap.PAGESIZE == 0
            assert len(cache) == blocks
            assert not cache.any()
            cache.fill_(1.0)


def test_what_it_cannot_serve_is_said() -> None:
    attention = TorchAttention(SimpleNamespace(device="cpu"))
    for kind in ("full", "sliding", "chunked"):
        for dtype in ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"):
            support = attention.support(spec(0, dtype=dtype, kind=kind, window=None if kind == "full" else 4))
            assert (support.problem, support.block_size_multiple, support.block_size_max) == (None, 1, None)
            assert dtype in support.dtypes
    assert attention.support(spec(0, needs=("alibi_slopes", "key_scale", "value_scale"))).problem is None
    assert "int8" in (attention.support(spec(0, dtype="int8")).problem or "")
    assert "recurrent" in (attention.support(spec(3, kind="recurrent")).problem or "")
    assert "rotations" in (attention.support(spec(0, needs=("rotations",))).problem or "")


def test_another_layout_replaces_the_first() -> None:
    attention = build([spec(0), spec(1)], [(0, 1)], [(0,), (1,)])
    attention.allocate(KVLayout((spec(0),), (KVGroup(0, (0,), "full", 2),), (KVStorage((0,), 9),)))
    assert attention.kv(0)[0].shape[:2] == (9, 2)
    with pytest.raises(KeyError):
        attention.kv(1)


def test_too_large_a_cache_names_the_setting_to_change() -> None:
    attention = TorchAttention(SimpleNamespace(device="cpu"))
    huge = KVLayout((spec(0),), (KVGroup(0, (0,), "full", 1 << 20),), (KVStorage((0,), 1 << 30),))
    with pytest.raises(CacheMemoryError, match=r"cpu; set plugins\.cache\.memory lower"):
        attention.allocate(huge)


def test_the_descriptor_names_the_class_and_ranks_last() -> None:
    (provider,) = trivet_providers()
    assert (provider.role, provider.name) == ("attention", "torch")
    module, _, name = provider.factory.partition(":")
    assert (module, name) == (TorchAttention.__module__, TorchAttention.__name__)
    assert provider.suits is not None
    for device in ("cpu", "cuda"):
        assert provider.suits(SimpleNamespace(device=device)).rank == 10
